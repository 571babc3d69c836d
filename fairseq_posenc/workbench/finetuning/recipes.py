"""Trains with ``fairseq-hydra-train`` by a recipe: a YAML file of ``finetune_configs``.

The file leaves open what depends on the model, the data and the machine: hydra's overrides set it.
"""

import json
import math
import re
import warnings
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fairseq.dataclass.initialize import hydra_init
from fairseq.tasks import TASK_DATACLASS_REGISTRY
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fairseq_posenc.checkpoints.faults import BUILD_ERRORS
from fairseq_posenc.errors import UserError, counted
from fairseq_posenc.workbench.loading.checkpoints import updates_done
from fairseq_posenc.workbench.loading.pretrained import Pretrained
from fairseq_posenc.workbench.running import devices, logs, programs
from fairseq_posenc.workbench.running.progress import say

# What hydra reads as a string even without quotes, not as a number, true or null; only ASCII.
_UNQUOTED = re.compile(r"(?!(true|false|null|nan|inf)$|\.\d)[a-z_./][\w./+-]*", re.ASCII | re.I)
_WARMUP_RATIO = 0.06  # RoBERTa's, for SQuAD's task, which has no option for it
# Settings that define a run, and the options of commands for them.
_OPTIONS = {"common.seed": "--seeds", "optimization.lr": "--learning-rates", "task.data": "--data"}
_OPTIONS |= {"checkpoint.save_dir": "--out", "checkpoint.finetune_from_model": "--checkpoint"}
_ON_CPU = re.compile(r"\+*common\.cpu=(true|yes|y|on|[1-9]\d*)", re.I)  # as omegaconf reads them


def add_set(parser: ArgumentParser, example: str) -> None:
    """Add ``--set``, with overrides of a recipe, to a command's options."""
    add = parser.add_argument
    text = f"override a setting of fairseq, as in {example}; repeatable"
    add("--set", dest="changes", action="append", default=[], metavar="KEY=VALUE", help=text)


def compose_file(path: Path, overrides: Sequence[str] = ()) -> DictConfig:
    """Compose a file, its defaults and fairseq's own, as ``fairseq-hydra-train`` does.

    This ends any earlier use of hydra in this process.

    Raises:
        HydraException: the file does not exist, or an override is malformed or of no known option.
    """
    hydra_init(path.stem)  # registers fairseq's defaults, which the file is merged into
    GlobalHydra.instance().clear()  # a process has one hydra
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # hydra warns about fairseq's configuration
        with initialize_config_dir(str(path.parent.resolve()), version_base="1.1"):  # as fairseq
            return compose(path.stem, list(overrides))


def compose_recipe(path: Path, examples: int, overrides: Sequence[str]) -> DictConfig:
    """Compose a recipe, and compute the numbers of updates and of warm-up updates if it has none.

    Args:
        path: the YAML file.
        examples: size of the training set; an epoch reads every example once.
        overrides: hydra's overrides, which commands take as ``--set``.

    Raises:
        UserError: hydra refuses an override or a value, or the updates cannot be counted.
    """
    try:
        cfg = compose_file(path, overrides)
        # Adds the task's defaults, and checks the types of its options.
        cfg.task = OmegaConf.merge(TASK_DATACLASS_REGISTRY[cfg.task._name], cfg.task)
        # `select` gives None for `???`, which a recipe leaves open. A user's warm-up of 0 stays.
        updates = OmegaConf.select(cfg, "optimization.max_update") or _count_updates(cfg, examples)
        warmup = OmegaConf.select(cfg, "lr_scheduler.warmup_updates") or 0
        if not (warmup or any("lr_scheduler.warmup_updates=" in x for x in overrides)):
            warmup = round(cfg.task.get("warmup_ratio", _WARMUP_RATIO) * updates)
        cfg.optimization.max_update = int(updates)
        cfg.lr_scheduler.warmup_updates = int(warmup)
    except UserError:  # it is a ValueError, so the next line would catch it
        raise
    except (HydraException, OmegaConfBaseException, *BUILD_ERRORS) as error:
        raise UserError(f"{path}: {' '.join(str(error).split())}") from error
    return cfg


def _count_updates(cfg: DictConfig, examples: int) -> int:
    """Count the updates of all epochs; ``update_freq`` is the same in all of them."""
    remedy = "the number of updates is unknown: give --set optimization.max_update=N"
    if cfg.dataset.max_tokens:
        raise UserError(f"with --set dataset.max_tokens {remedy}")
    if not cfg.dataset.batch_size:
        raise UserError(f"without dataset.batch_size {remedy}")
    batches = math.ceil(examples / cfg.dataset.batch_size)
    num_devices = cfg.distributed_training.distributed_world_size
    batches_per_update = num_devices * cfg.optimization.update_freq[0]  # a list by epoch
    return math.ceil(batches / batches_per_update) * cfg.optimization.max_epoch


def build_settings(
    pretrained: Pretrained, values: Mapping[str, Any], overrides: Sequence[str]
) -> dict[str, str]:
    """Build the overrides of a recipe for a training run from a pre-trained model.

    They are returned by name, so that two training runs can be compared.

    Args:
        pretrained: the model, whose options define the new one's.
        values: options of this run by name; ``checkpoint.save_dir`` gets hydra's logs as well.
        overrides: they win, the last for each setting; settings that have an option are refused.
    """
    overridden = [word.lstrip("+~").partition("=")[0] for word in overrides]  # settings' names
    options = {
        f"++model.{name}": value  # hydra adds or changes an option with `++`
        for name, value in pretrained.model_options.items()  # all that define its shape
        if f"model.{name}" not in overridden
    }
    settings = {
        "hydra.run.dir": values["checkpoint.save_dir"],  # where hydra writes its logs
        **options,
        **values,
        # fairseq starts from this checkpoint unless the folder has checkpoint_last.pt.
        "checkpoint.finetune_from_model": pretrained.path.resolve(),
    }
    for name in overridden:  # in the user's order
        if name in settings and (option := _OPTIONS.get(name)):
            raise UserError(f"--set {name}: a run has this setting from {option}; give that")
    formatted = [*(format_override(*pair) for pair in settings.items()), *overrides]
    return {name: value for name, _, value in (x.partition("=") for x in formatted)}  # last wins


def join_overrides(settings: Mapping[str, str]) -> list[str]:
    """Join names and values to hydra's overrides; ``~NAME``, which deletes one, has no ``=``."""
    return [x if x.startswith("~") and not y else f"{x}={y}" for x, y in settings.items()]


def build_command(path: Path, settings: Mapping[str, str]) -> list[str]:
    """Build the command that trains by the recipe ``path``, with overrides."""
    recipe = [f"--config-dir={path.parent}", f"--config-name={path.stem}"]
    return ["fairseq-hydra-train", *recipe, *join_overrides(settings)]


def format_override(name: str, value: Any) -> str:
    """Format a hydra override; strings with special characters are quoted."""
    if not isinstance(value, (str, Path)):
        return f"{name}={json.dumps(value)}"
    if _UNQUOTED.fullmatch(str(value)):
        return f"{name}={value}"
    return f"{name}={QuotedString(str(value), Quote.single).with_quotes()}"


def train(
    command: Sequence[str],
    folder: Path,
    lock: int,
    label: str,
    updates: int,
    metric: str,
    environment: programs.Environment | None = None,
) -> None:
    """Train, or continue, and report the figure of each validation.

    Args:
        command: ``fairseq-hydra-train`` and its options.
        folder: for checkpoints and log.
        lock: lock of the folder (its descriptor), which the command inherits.
        label: name of the run in messages.
        updates: number of updates, for messages.
        metric: name of the figure in fairseq's log.
        environment: variables that select its GPU.

    Raises:
        RunError: training failed.
    """
    before = updates_done(folder)
    start = f"resuming from update {before:,}" if before else "starting"
    say(f"{label}: {start} ({counted(updates, 'updates')} in all)")
    # Chosen only now, because a cluster's machine may have other devices than the user's.
    if devices.choose_device() != "cuda" or any(map(_ON_CPU.fullmatch, command)):
        command = [*command, "common.cpu=true", "common.fp16=false"]  # the last values count
        say(f"{label}: training on the CPU, without fp16")

    def report_validation(line: str) -> None:
        entry = logs.parse_line(line)
        if entry and entry.kind == "valid" and metric in entry.figures:
            score = float(entry.figures[metric])
            say(f"{label}: update {entry.updates:,} of {updates:,}, {metric} {score:.2f}")

    programs.run_logged(command, folder / logs.TRAIN_LOG, lock, report_validation, environment)
