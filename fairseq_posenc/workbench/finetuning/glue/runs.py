"""Plans the runs of GLUE: one for each task, learning rate and seed, each in its own folder.

The folder of a run, such as ``OUT/RTE/lr2e-05-seed1``, is bound to all fields of its
:class:`GlueRun` (:mod:`fairseq_posenc.folders`), so that it is evaluated from its folder alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from fairseq.dataclass.initialize import hydra_init
from omegaconf import DictConfig, OmegaConf

from fairseq_posenc import folders
from fairseq_posenc.errors import UserError
from fairseq_posenc.tasks.glue.data import find_training_data
from fairseq_posenc.tasks.glue.definitions import TASKS, Task
from fairseq_posenc.tasks.glue.task import GlueTaskConfig
from fairseq_posenc.workbench.finetuning.composing import (
    CONFIG_ERRORS,
    compose_file,
    count_updates,
)
from fairseq_posenc.workbench.loading.checkpoints import updates_done
from fairseq_posenc.workbench.loading.pretrained import Pretrained
from fairseq_posenc.workbench.running.files import find_shipped_folder
from fairseq_posenc.workbench.running.host import USER_DIR

CONFIGS = find_shipped_folder("finetune_configs") / "glue"
# What a paper reports of the runs of a task, by protocol.
STATISTICS = {"m4m": "best", "decbert": "mean"}
RESULT = "result.json"  # a run's metrics; it marks the run as done
_UNQUOTED = re.compile(r"[A-Za-z_./][\w./+-]*")  # texts that hydra reads without quotes


class GlueRun(NamedTuple):
    """A fine-tuning with one task, learning rate and seed."""

    protocol: str  # the paper whose set-up it follows: `m4m` or `decbert`
    task: str  # name of the task
    learning_rate: float  # peak learning rate
    seed: int
    metric: str  # metric on the development set that chooses the checkpoint
    max_update: int  # number of updates
    data: str  # folder of the data-bin
    checkpoint: str  # checkpoint of the pre-trained model
    modified: int  # modification time of the checkpoint, in nanoseconds
    # settings of `fairseq-hydra-train`, except for the checkpoint to start from; and `--config-dir`
    settings: dict[str, str]

    @property
    def command(self) -> list[str]:
        """The command that trains the run."""
        words = [f"{name}={value}" if value else name for name, value in self.settings.items()]
        return ["fairseq-hydra-train", *words]

    @property
    def label(self) -> str:
        """Name of the run in messages."""
        return f"{self.task}, learning rate {self.learning_rate:g}, seed {self.seed}"

    @property
    def reported_metric(self) -> str:
        """The metric that is reported; for MNLI, on the matched development set."""
        return f"{self.metric}_m" if len(TASKS[self.task].valid_splits) > 1 else self.metric

    def folder(self, out: Path) -> Path:
        """Build the path of the run's folder."""
        return out / self.task / f"lr{self.learning_rate:g}-seed{self.seed}"


class GlueRequest(NamedTuple):
    """The user's choices for the fine-tunings of a model."""

    protocol: str  # `m4m` or `decbert`
    tasks: Sequence[Task]
    data: Path  # folder of their data-bins
    pretrained: Pretrained  # the model to start from, its path absolute
    out: Path  # folder of the runs, absolute
    rates: Sequence[float]  # peak learning rates; empty for those of the YAML files
    seeds: Sequence[int]  # random seeds; empty for those of the YAML files
    configs: Path  # folder of the YAML files
    overrides: Sequence[str]  # hydra overrides


def compose_task_config(path: Path, examples: int, overrides: Sequence[str]) -> DictConfig:
    """Compose a task's configuration; the data set the numbers of updates that it leaves at 0.

    Args:
        path: the YAML file.
        examples: size of the training set.
        overrides: the user's hydra overrides.

    Raises:
        UserError: the file does not exist, or hydra refuses it or an override.
    """
    if not path.is_file():
        raise UserError(f"{path} does not exist: name the folder of your YAML files with --configs")
    hydra_init(path.stem)  # registers fairseq's defaults, which the file is merged into
    try:
        cfg = compose_file(path, overrides)
        cfg.task = OmegaConf.merge(OmegaConf.structured(GlueTaskConfig), cfg.task)
    except CONFIG_ERRORS as error:
        raise UserError(f"{path}: {' '.join(str(error).split())}") from error
    updates = cfg.optimization.max_update or count_updates(cfg, examples)
    cfg.optimization.max_update = int(updates)
    warmup = cfg.lr_scheduler.warmup_updates or round(cfg.task.warmup_ratio * updates)
    cfg.lr_scheduler.warmup_updates = int(warmup)
    return cfg


def plan_runs(request: GlueRequest) -> list[GlueRun]:
    """Plan the runs of all tasks.

    Raises:
        UserError: a task has no data or no configuration, its data have another dictionary, or an
            example is longer than the model's positions.
    """
    runs = []
    pretrained = request.pretrained
    for task in request.tasks:
        data = find_training_data(request.data, task)
        pretrained.check_dictionary(data.dictionary)
        data.check_lengths(pretrained.max_positions, pretrained.path)
        path = request.configs / f"{task.config_name(request.protocol)}.yaml"
        cfg = compose_task_config(path, data.splits["train"]["examples"], request.overrides)
        # The options come first, then the file's lists, then the values of a single training.
        rates = request.rates or cfg.task.learning_rates or cfg.optimization.lr[:1]
        seeds = request.seeds or cfg.task.seeds or [cfg.common.seed]
        for rate, seed in product(rates, seeds):
            run = GlueRun(
                protocol=request.protocol,
                task=task.name,
                learning_rate=rate,
                seed=seed,
                metric=cfg.checkpoint.best_checkpoint_metric,
                max_update=cfg.optimization.max_update,
                data=str(data.path),
                checkpoint=str(pretrained.path),
                modified=pretrained.path.stat().st_mtime_ns,
                settings={},  # built below from the other fields
            )
            runs.append(run._replace(settings=_build_settings(run, path.stem, cfg, request)))
    return runs


def _build_settings(
    run: GlueRun, config_name: str, cfg: DictConfig, request: GlueRequest
) -> dict[str, str]:
    """Build the settings of a run; the last value of an option counts, as in hydra."""
    folder = run.folder(request.out)
    values: dict[str, Any] = {
        "hydra.run.dir": folder,
        "common.user_dir": USER_DIR,
        "common.seed": run.seed,
        "task.data": run.data,
        "task.max_positions": request.pretrained.max_positions,
    }
    overridden = {word.lstrip("+~").partition("=")[0] for word in request.overrides}
    known = set(cfg.get("model") or {})  # omegaconf's own `in` is false for values of `???`
    for name, value in request.pretrained.roberta_section.items():
        if f"model.{name}" not in overridden:
            plus = "" if name in known else "+"  # hydra adds an option only with `+`
            values[f"{plus}model.{name}"] = value
    values |= {
        "optimization.lr": [run.learning_rate],
        "optimization.max_update": run.max_update,
        "lr_scheduler.warmup_updates": cfg.lr_scheduler.warmup_updates,
        "checkpoint.save_dir": folder,
    }
    words = [f"--config-dir={request.configs.resolve()}", f"--config-name={config_name}"]
    words += [*(format_override(name, value) for name, value in values.items())]
    # A dictionary, so that another request is refused with the settings that differ.
    return dict(word.partition("=")[::2] for word in [*words, *request.overrides])


def format_override(name: str, value: Any) -> str:
    """Format a hydra override; texts with special characters are quoted."""
    if not isinstance(value, (str, Path)):
        return f"{name}={json.dumps(value)}"
    if _UNQUOTED.fullmatch(str(value)):
        return f"{name}={value}"
    escaped = str(value).replace("\\", "\\\\").replace("'", "\\'")
    return f"{name}='{escaped}'"


def claim(run: GlueRun, out: Path) -> None:
    """Bind a run's folder to it; one in which nothing was trained is emptied first.

    Raises:
        UserError: the folder has a run with other settings, or is in use.
    """
    folder = run.folder(out)
    with folders.lock_folder(folder):
        if not updates_done(folder) and not (folder / RESULT).exists():
            folders.empty(folder)
        folders.claim(folder, run._asdict())


def read_run(folder: Path) -> GlueRun:
    """Read the run that a folder is bound to.

    Raises:
        UserError: the folder is not that of a run of GLUE.
    """
    content = folders.read_json(folder / folders.REQUEST)
    if not isinstance(content, dict) or content.keys() != set(GlueRun._fields):
        raise UserError(f"{folder}: is not the folder of a run of glue; delete it")
    return GlueRun(**content)


def list_runs(out: Path) -> list[GlueRun]:
    """List the runs in a folder, those of earlier commands too."""
    return [read_run(path.parent) for path in sorted(out.glob(f"*/*/{folders.REQUEST}"))]
