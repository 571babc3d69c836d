"""Fine-tunes on SQuAD with ``fairseq-hydra-train``, configured by the recipe, model and data.

The recipe is a YAML file that leaves open (``???``) what depends on the model, the data and the
machine. The completed configuration is written into the folder of the results, as ``CONFIG``. The
same call continues an interrupted training.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional, cast

import torch
from omegaconf import DictConfig, OmegaConf

from fairseq_posenc import folders
from fairseq_posenc.checkpoints.recovery import ensure_last_checkpoint
from fairseq_posenc.errors import UserError
from fairseq_posenc.files import write_whole
from fairseq_posenc.tasks.squad.databin import SquadDataBin, open_data_bin
from fairseq_posenc.workbench.finetuning.composing import (
    CONFIG_ERRORS,
    compose_file,
    count_updates,
)
from fairseq_posenc.workbench.loading.checkpoints import updates_done
from fairseq_posenc.workbench.loading.pretrained import Pretrained, read_pretrained
from fairseq_posenc.workbench.running.files import find_shipped_folder
from fairseq_posenc.workbench.running.host import USER_DIR
from fairseq_posenc.workbench.running.logs import TRAIN_LOG, format_progress
from fairseq_posenc.workbench.running.programs import run_logged
from fairseq_posenc.workbench.running.progress import say

# Hydra makes no log file beside ours: it opens one with the first record, and no record goes there.
_ONE_LOG = {
    "job_logging": {"handlers": {"file": {"delay": True}}, "root": {"handlers": ["console"]}}
}
CONFIG = "finetune.yaml"
_WARMUP_RATIO = 0.06  # RoBERTa's: M4M's paper gives none
# In M4M's paper, encodings that diverged at the rate of the others, and the rate that they needed.
_DIVERGED = {"raffel", "tupe"}
_SMALLER_RATE = 2.5e-5


def find_recipe(data_bin: SquadDataBin) -> Path:
    """Find the recipe for the version of SQuAD of some data."""
    version = data_bin.version.replace(".", "")
    return find_shipped_folder("finetune_configs") / f"squad{version}.yaml"


def _parse_overrides(overrides: Sequence[str]) -> DictConfig:
    for override in overrides:
        name, equals, _ = override.partition("=")
        if not (name.strip() and equals):
            raise UserError(f"--set {override}: write NAME=VALUE, as in optimization.lr=[2e-5]")
    return OmegaConf.from_dotlist(list(overrides))


def _share_batch(config: Any, gpus: int) -> None:
    """Divide the batch of the recipe, which is for one GPU, equally among several."""
    maximum = config.dataset.batch_size  # that fits the memory of a GPU
    batch = maximum * config.optimization.update_freq[0]
    shares = range(maximum, 0, -1)
    per_gpu = next((share for share in shares if batch % (gpus * share) == 0), None)
    if per_gpu is None:
        raise UserError(
            f"a batch of {batch} windows cannot be divided among {gpus} GPUs: select fewer with "
            "CUDA_VISIBLE_DEVICES"
        )
    config.dataset.batch_size = per_gpu
    config.optimization.update_freq = [batch // (gpus * per_gpu)]


def _set_updates(config: Any, data_bin: SquadDataBin) -> None:
    """Set the numbers of updates in total and in the warm-up, unless they are set."""
    optimization = config.optimization
    if OmegaConf.is_missing(optimization, "max_update"):
        if config.dataset.get("max_tokens"):
            raise UserError(
                "--set dataset.max_tokens: the number of updates is then unknown; set "
                "optimization.max_update too"
            )
        optimization.max_update = count_updates(config, data_bin.train_windows)
    if OmegaConf.is_missing(config.lr_scheduler, "warmup_updates"):
        config.lr_scheduler.warmup_updates = round(_WARMUP_RATIO * optimization.max_update)


class FineTuning(NamedTuple):
    """The user's choices for a fine-tuning."""

    checkpoint: Path  # the pre-trained model
    data: Path  # folder made by `fairseq-posenc preprocess squad`
    out: Path  # folder of the results
    yaml_file: Optional[Path]  # the recipe; None for the one of the data's version of SQuAD
    overrides: Sequence[str]  # `key=value` that override the recipe

    def compose(self, gpus: int) -> DictConfig:
        """Compose the configuration for a number of GPUs; 0 for the processor.

        From weak to strong: the recipe; what the model, the data and the machine decide; the user's
        overrides; then the numbers of updates that are still open.

        Raises:
            UserError: the recipe or an override cannot be read, or sizes do not fit.
        """
        pretrained = read_pretrained(self.checkpoint, for_fairseq=True)
        data_bin = open_data_bin(self.data)
        pretrained.check_dictionary(data_bin.dictionary)
        shipped_recipe = find_recipe(data_bin)
        yaml_file = self.yaml_file or shipped_recipe
        local = self._list_local_settings(pretrained, gpus)
        diverged = {item.name for item in pretrained.spec.items} & _DIVERGED
        if diverged and yaml_file == shipped_recipe:
            local["optimization"] = {"lr": [_SMALLER_RATE]}
        try:
            changes = _parse_overrides(self.overrides)
            recipe = compose_file(yaml_file)
            OmegaConf.set_struct(recipe, False)  # accept options that the file does not have
            model = recipe.get("model") or {}
            local["model"] = {
                name: value
                for name, value in pretrained.roberta_section.items()
                if name not in model or OmegaConf.is_missing(model, name)  # the recipe's value wins
            }
            config = OmegaConf.merge(recipe, local)
            if gpus > 1:
                _share_batch(config, gpus)
            config = OmegaConf.merge(config, changes)
            assert isinstance(config, DictConfig)
            data_bin.check_lengths(config.model.max_positions, pretrained.path)
            _set_updates(config, data_bin)
        except UserError:  # its message is already good
            raise
        except CONFIG_ERRORS as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise UserError(f"{yaml_file}, --set: {reason}") from None
        return config

    def _list_local_settings(self, pretrained: Pretrained, gpus: int) -> dict[str, Any]:
        """List the settings that depend on paths and devices."""
        out = str(self.out.resolve())
        processor = {} if gpus else {"cpu": True, "fp16": False}
        return {
            "common": {"user_dir": str(USER_DIR), **processor},
            "task": {"data": str(self.data.resolve())},
            "checkpoint": {"save_dir": out, "finetune_from_model": str(pretrained.path.resolve())},
            "distributed_training": {"distributed_world_size": max(gpus, 1)},
            "hydra": {"run": {"dir": out}, "output_subdir": None, **_ONE_LOG},
        }

    def train(self) -> None:
        """Train, or continue, on all GPUs of this machine or its processor.

        Raises:
            UserError: wrong input, or the folder has something else.
        """
        # For one GPU, so that any machine can resume the training.
        request = cast("dict[str, Any]", OmegaConf.to_container(self.compose(gpus=1)))
        config = self.compose(torch.cuda.device_count())
        with folders.lock_folder(self.out) as lock:
            if (self.out / folders.REQUEST).exists() and not updates_done(self.out):
                folders.empty(self.out)  # it failed before its first checkpoint
            folders.claim(self.out, request)
            if updates_done(self.out) >= config.optimization.max_update:
                say(f"{self.out}: the training is finished, and nothing was changed")
                return
            write_whole(self.out / CONFIG, f"# @package _group_\n{OmegaConf.to_yaml(config)}")
            ensure_last_checkpoint(self.out)
            command = ["fairseq-hydra-train", "--config-dir", str(self.out.resolve())]
            command += ["--config-name", Path(CONFIG).stem]
            run_logged(command, self.out / TRAIN_LOG, lock, _print_progress)


def _print_progress(line: str) -> None:
    """Print a line of the log if it shows the progress of the training."""
    if text := format_progress(line):
        say(text)
