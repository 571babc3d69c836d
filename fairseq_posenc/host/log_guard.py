"""Stops fairseq's commands before they lose a run, by filters on fairseq's loggers.

fairseq has no hook between reading its options and training, and none before it reads or writes a
checkpoint. But its commands log their configuration and what they are about to do, and an
exception in a log filter ends the command.
"""

import logging
import os
import re
import shutil
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fairseq.dataclass.configs import CheckpointConfig
from omegaconf import DictConfig

from fairseq_posenc import locks
from fairseq_posenc.checkpoints.recovery import LAST, restore_last
from fairseq_posenc.checkpoints.resuming import start_resuming
from fairseq_posenc.checkpoints.safe_loading import is_torn
from fairseq_posenc.errors import UserError
from fairseq_posenc.host.refused_options import (
    check_precision,
    check_window,
    refuse_broken_options,
    refuse_long_blocks,
    refuse_training_alone,
    refuse_wrong_best,
)
from fairseq_posenc.host.task_repairs import keep_patience, prepare_whole_words
from fairseq_posenc.host.training_data import check_data, check_document_ends
from fairseq_posenc.specs import Spec

_TRAINER = "fairseq.trainer"
_CHECKPOINTS = "fairseq.checkpoint_utils"
_CLI = "fairseq_cli"
_COMMANDS = ["train", "generate", "interactive", "eval_lm", "validate"]
_LOCK = ".fairseq-train"  # lock file in a --save-dir
logger = logging.getLogger(__name__)
_held: dict[Path, int] = {}  # locks by folder, open until the process ends
_LOADED = re.compile(r"Loaded checkpoint (.+) \(epoch \d+ @ (\d+) updates\)", re.DOTALL)


class _LogGuard(logging.Filter):
    """Checks what fairseq is about to do when it logs it."""

    settings: DictConfig | None = None  # of the command that runs, once it has logged them
    model: weakref.ref[Any] | None = None  # that was built last; it may have been deleted
    _command = ""
    _task: Any = None  # of the model

    def filter(self, record: logging.LogRecord) -> bool:
        """Check what a record announces; return whether to show it."""
        command = record.name.partition(f"{_CLI}.")[2]
        # fairseq logs its configuration, not a copy, so changes here take effect. But
        # fairseq-validate logs the configuration of the checkpoint's training.
        if command and isinstance(record.msg, DictConfig):
            if command == "validate":
                prepare_whole_words(self._task, record.msg.bpe)
            else:
                self._check_settings(record.msg, command)
        elif record.name == _TRAINER:
            self._check_trainer(record.getMessage())
        elif record.name == _CHECKPOINTS and record.getMessage().startswith("Traceback"):
            return False  # fairseq also raises the error, which excepthook prints in one line
        # The filter needs messages of level INFO; show only those that LOGLEVEL asks for.
        package = logging.getLogger(record.name.partition(".")[0])
        return record.levelno >= package.getEffectiveLevel()

    def _check_settings(self, settings: DictConfig, command: str) -> None:
        """Check the settings of a command before it does anything."""
        self.settings, self._command = settings, command
        check_precision(settings.common)
        check_data(settings, command)
        if command == "eval_lm":
            check_window(settings)
        if command != "train":
            return
        refuse_training_alone(settings.distributed_training.distributed_world_size)
        refuse_wrong_best(settings.checkpoint)
        refuse_broken_options(settings)
        _lock_save_dir(settings)
        # By default only rank 0 reads a checkpoint, and sends it to the others as pickled classes
        # of fairseq, which torch loads only if files may run code. So several ranks could not
        # resume a training.
        settings.checkpoint.load_checkpoint_on_all_dp_ranks = True

    def check_model(self, model: Any, task: Any, specs: Sequence[Spec]) -> None:
        """Check a model with stacks of ``specs`` that a command has built, and prepare its task."""
        for spec in specs:
            check_document_ends(spec, task)
        self.model, self._task = weakref.ref(model), task
        if self.settings is None:
            return
        if self._command == "train":
            prepare_whole_words(task, self.settings.bpe)
            keep_patience(task, self.settings.checkpoint)
        elif self._command == "eval_lm":
            refuse_long_blocks(self.settings, model.max_positions())

    def _check_trainer(self, message: str) -> None:
        """Check what the trainer is about to do: start a training, write or read a checkpoint."""
        # The path at the end of a message; empty for any other message.
        missing = message.partition("No existing checkpoint found ")[2]
        target = message.partition("Saving checkpoint to ")[2]
        source = message.partition("Preparing to load checkpoint ")[2]
        if missing and not _is_default_restore(Path(missing), self.settings):
            problem = "is a folder" if Path(missing).is_dir() else "does not exist"
            raise UserError(
                f"--restore-file {missing} {problem}; training would have started from random "
                "weights"
            )
        if target:
            _refuse_full_disk(target)
        if source:
            _restore_if_torn(Path(source), self.settings)
            start_resuming(Path(source), self.settings)
        if (loaded := _LOADED.fullmatch(message)) and self.settings is not None:
            _end_if_finished(Path(loaded[1]), int(loaded[2]), self.settings)


def _lock_save_dir(settings: DictConfig) -> None:
    """Lock a ``--save-dir`` until this process ends; only rank 0 does so, for all ranks."""
    folder = Path(settings.checkpoint.save_dir).resolve()
    rank = settings.distributed_training.distributed_rank
    if rank != 0 or settings.checkpoint.no_save or folder in _held or not folder.is_dir():
        return
    refusal = (
        f"--save-dir {folder}: {{holder}} trains there; wait until it ends, or name another folder"
    )

    def warn(reason: str) -> None:
        logger.warning(f"{folder}: cannot be locked against a second training ({reason})")

    _held[folder] = locks.acquire(folder / _LOCK, refusal, warn)


def _is_default_restore(path: Path, settings: DictConfig | None) -> bool:
    """Check whether fairseq looks for a run's last checkpoint because no other was requested."""
    if settings is None:  # a program uses fairseq's trainer without its command
        return path.name.startswith("checkpoint_last") and path.parent.is_dir()
    if settings.checkpoint.restore_file != CheckpointConfig.restore_file:
        return False
    return path.parent == Path(settings.checkpoint.save_dir)


def _restore_if_torn(path: Path, settings: DictConfig | None) -> None:
    """Restore a run's last checkpoint if it was not written to its end; refuse other such files."""
    if not path.is_file() or not is_torn(path):
        return
    if path.name != LAST or not _is_default_restore(path, settings):
        raise UserError(f"{path} is not a complete checkpoint: it was not written to its end")
    if not restore_last(path):
        raise UserError(
            f"{path} was not written to its end, and the folder has no complete checkpoint: remove "
            "it to start from scratch"
        )


def _end_if_finished(path: Path, updates: int, settings: DictConfig) -> None:
    """End a training that has made all its updates; fairseq would make and save another one.

    Raises:
        SystemExit: with 0, as when fairseq has made all epochs.
        UserError: the checkpoint is of another training, so this one would do nothing.
    """
    wanted = settings.optimization.max_update
    if not 0 < wanted <= updates:
        return
    state = f"{path} has made {updates:,} updates of --max-update {wanted:,}"
    if path.parent.resolve() != Path(settings.checkpoint.save_dir).resolve():
        raise UserError(
            f"{state}: nothing is left to train; --reset-optimizer --reset-lr-scheduler "
            "--reset-meters --reset-dataloader start counting from 0"
        )
    logger.warning(f"{state}: the training is finished, and nothing was changed")
    raise SystemExit(0)


def _refuse_full_disk(path: str) -> None:
    """Refuse to write a checkpoint for which the disk has no room.

    fairseq writes a new file first, but then copies it onto ``checkpoint_last.pt`` in place. On a
    full disk the copy fails, and the checkpoint to resume from is lost.
    """
    folder = os.path.dirname(path) or "."
    sizes = [entry.stat().st_size for entry in os.scandir(folder) if entry.name.endswith(".pt")]
    needed = int(1.1 * max(sizes, default=0))
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"no room for a checkpoint in {folder}: it needs about {needed / 1e6:,.0f} MB and "
            f"{free / 1e6:,.0f} MB are free; the checkpoints there are complete. Make room and "
            "run the same command again to resume from the last one."
        )


GUARD = _LogGuard()


def install_log_guard() -> None:
    """Add the filter to fairseq's loggers."""
    for name in (_TRAINER, _CHECKPOINTS, *(f"{_CLI}.{command}" for command in _COMMANDS)):
        source_logger = logging.getLogger(name)
        source_logger.setLevel(logging.INFO)
        source_logger.addFilter(GUARD)
