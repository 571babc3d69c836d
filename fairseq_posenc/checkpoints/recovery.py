"""Resumes training runs: recovers ``checkpoint_last.pt``, and refuses states that do not fit.

A run may have been killed while fairseq wrote that file. A checkpoint is *whole* if it can be
loaded, and *torn* if its file ends too early.
"""

import logging
import os
import re
import shutil
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from fairseq_posenc.checkpoints.safe_loading import is_torn, open_checkpoint, open_whole
from fairseq_posenc.errors import UserError, shortened
from fairseq_posenc.files import written_whole

logger = logging.getLogger(__name__)
LAST = "checkpoint_last.pt"  # also the default of --restore-file
BEST = "checkpoint_best.pt"
_NAMES = re.compile(r"checkpoint(\d+|_\d+_\d+|_last|_best|\.best_.+)\.pt")  # fairseq's file names
_SECTIONS = ("task", "model", "criterion", "optimizer", "lr_scheduler", "optimization")
_METRIC = "best_checkpoint_metric"
# Of these sections, only the named settings are compared; of those above, all.
_FURTHER = {
    "common": ("seed", "bf16", "fp16"),
    "dataset": ("max_tokens", "batch_size"),
    "checkpoint": (_METRIC, f"maximize_{_METRIC}"),
}
_ALIASES = {"arch", "user_dir"}  # other keys for the model's name and the package's folder
# Settings by name, and the class of a section by the name of the section:
# {"optimizer": "adam", "adam_betas": "(0.9, 0.98)", "seed": 1}.
FlatSettings = dict[str, object]


class WholeCheckpoint(NamedTuple):
    """A checkpoint from which training can be resumed; ``max`` of several is the newest."""

    updates: int  # number of updates made
    written: int  # modification time, in nanoseconds
    path: Path


def newest_checkpoint(folder: Path) -> WholeCheckpoint | None:
    """Find the newest whole checkpoint in the folder of a training run, or None."""
    files = folder.iterdir() if folder.is_dir() else ()
    return max(filter(None, map(read_if_whole, files)), default=None)


def ensure_last_checkpoint(folder: Path) -> bool:
    """Replace ``checkpoint_last.pt`` by the newest whole checkpoint if it is torn or missing.

    Return False if the folder has no whole checkpoint.
    """
    last = folder / LAST
    if last.exists() and not is_torn(last):
        return True
    if (newest := newest_checkpoint(folder)) is None:
        return False
    fault = "was not written to its end" if last.exists() else "is missing"
    with written_whole(last) as new:  # renamed when complete: several processes may do this
        shutil.copyfile(newest.path, new)
    logger.warning(
        f"{last} {fault}; training resumes from {newest.path.name}, the newest complete "
        f"checkpoint (update {newest.updates:,})"
    )
    return True


def read_if_whole(path: Path) -> WholeCheckpoint | None:
    """Read a checkpoint's number of updates; None if training cannot be resumed from the file."""
    if not _NAMES.fullmatch(path.name):
        return None
    try:  # loads the whole file, so a torn one fails here
        updates = int(open_whole(path)["optimizer_history"][-1]["num_updates"])
    except Exception:  # of any type, depending on the file
        return None
    return WholeCheckpoint(updates, path.stat().st_mtime_ns, path)


class Resumption(NamedTuple):
    """What a training run takes from the checkpoint that it is resumed from."""

    updates: int  # number of updates before the checkpoint was written
    loads_optimizer: bool  # whether the optimizer's state is loaded
    extra_state: dict[str, Any]  # what fairseq's iterator, meters and task save with the weights


def find_start(checkpoint: DictConfig) -> Path | None:
    """Find the local file that this section of settings names as a start; refuse an absent one."""
    from fairseq.file_io import PathManager  # takes seconds

    suffix = checkpoint.checkpoint_suffix  # of this rank's files, if each rank writes its part
    last = os.path.join(checkpoint.save_dir, LAST.replace(".pt", f"{suffix}.pt"))
    if checkpoint.restore_file != LAST:  # the user named a file
        option, named = "restore_file", checkpoint.restore_file.replace(".pt", f"{suffix}.pt")
    elif PathManager.exists(last):
        option, named = "", last
    else:
        once = getattr(checkpoint, "continue_once", None)  # not in all versions of fairseq
        option = "finetune_from_model" if once is None else "continue_once"
        if (named := getattr(checkpoint, option)) is None:
            return None
    if not PathManager.isfile(named):
        flag = f"--{option.replace('_', '-')} " if option else ""
        raise UserError(f"{flag}{named} is not a file; training would start from random weights")
    return Path(named) if os.path.isfile(named) else None  # remote files are not checked


def restore_if_torn(path: Path, checkpoint: DictConfig) -> None:
    """Restore ``checkpoint_last.pt`` if it is torn; refuse any other torn file."""
    if not is_torn(path):
        return
    is_last = checkpoint.restore_file == LAST and path == Path(checkpoint.save_dir, LAST)
    if not (is_last and ensure_last_checkpoint(path.parent)):
        raise UserError(
            f"{path} was not written to its end, and no complete checkpoint can replace it: name "
            "another one, or remove it to start from scratch"
        )


def check_resumption(path: Path, settings: DictConfig, finetunes: bool = False) -> Resumption:
    """Log how fairseq's ``settings`` differ from a checkpoint's; refuse states that do not fit.

    ``finetunes``: whether a new run takes only weights (with --store-ema also their average).
    """
    checkpoint = settings.checkpoint
    container: Any = OmegaConf.to_container(settings, resolve=True, enum_to_str=True)  # as saved
    now = select_training_settings(container)
    with open_checkpoint(path) as state:
        cfg = state.get("cfg")
        extra_state = dict(state.get("extra_state") or {})
        has_optimizer = state.get("last_optimizer_state") is not None
        updates = int((state.get("optimizer_history") or [{}])[-1].get("num_updates", 0))
    # An old checkpoint has `args` in place of a configuration.
    before = select_training_settings(cfg) if isinstance(cfg, dict) else {}
    if not finetunes and (changes := list_changes(before, now)):
        logger.info("%s resumes with other settings: %s", path, ", ".join(changes))
    if settings.ema.store_ema and "ema" not in extra_state:  # fairseq would end with a KeyError
        raise UserError(
            f"{path} has no average of its weights, and --store-ema can begin one only in a "
            "training run that starts from random weights: leave it out"
        )
    resets_optimizer = checkpoint.reset_optimizer or finetunes
    # fairseq would then count from update 0, which is wanted where a named file begins a new run.
    if not (has_optimizer or resets_optimizer) and path == Path(checkpoint.save_dir, LAST):
        raise UserError(
            f"{path} has no state of the optimizer (--no-save-optimizer-state), and its "
            f"{updates:,} updates would be made again: continue with --reset-optimizer"
        )
    loads_optimizer = has_optimizer and not resets_optimizer
    if loads_optimizer and not checkpoint.reset_lr_scheduler:
        _refuse_other_schedule(path, before, now)
    if not (checkpoint.reset_meters or resets_optimizer):  # with either, fairseq drops the best
        _refuse_other_metric(path, before, now)
    return Resumption(updates, loads_optimizer, extra_state)


def _refuse_other_schedule(path: Path, before: FlatSettings, now: FlatSettings) -> None:
    """Refuse the state of another class of schedule, of which fairseq would load a part.

    fairseq itself refuses another class of optimizer or criterion, after loading the weights.
    """
    old, new = before.get("lr_scheduler"), now.get("lr_scheduler")
    if None not in (old, new) and old != new:
        raise UserError(
            "LR scheduler does not match; please reset the lr-scheduler (--reset-lr-scheduler), or "
            f"give --lr-scheduler {old}: the state in {path} is of that, not of {new}"
        )


def _refuse_other_metric(path: Path, before: FlatSettings, now: FlatSettings) -> None:
    """Refuse the best value of another metric, which values of this one might never beat."""
    for name in _FURTHER["checkpoint"]:
        if name in before and before[name] != now[name]:
            raise UserError(
                f"{path} has the best {before.get(_METRIC, 'metric')} of its training, which is "
                f"not comparable under --{name.replace('_', '-')} {now[name]}: keep the metric, or "
                "continue with --reset-meters"
            )


def list_changes(before: FlatSettings, now: FlatSettings) -> list[str]:
    """List the settings that differ between two configurations of fairseq."""
    return [
        f"{name} {shortened(str(before[name]))} -> {shortened(str(now[name]))}"
        for name in now
        if name in before and before[name] != now[name]
    ]


def select_training_settings(cfg: Mapping[str, object]) -> FlatSettings:
    """Select the settings that shape a training run: of ``_SECTIONS``, and some ``_FURTHER``."""
    # A model that still uses argparse repeats the options of all sections in its own.
    skipped = _ALIASES.union(*(_get_section(cfg, key) for key in cfg if key not in _SECTIONS))
    flat: FlatSettings = {}
    for key in _SECTIONS:
        for name, value in _get_section(cfg, key).items():
            if name == "_name":
                flat[key] = value
            elif name not in skipped:
                flat.setdefault(name, value)  # of a repeated option, the first section's value
    for key, names in _FURTHER.items():
        section = _get_section(cfg, key)
        flat |= {name: section[name] for name in names if name in section}
    return flat


def _get_section(cfg: Mapping[str, object], key: str) -> FlatSettings:
    """Return a section as a dictionary; a model that still uses argparse has a Namespace."""
    section = cfg.get(key)
    section = vars(section) if isinstance(section, Namespace) else section
    return section if isinstance(section, dict) else {}
