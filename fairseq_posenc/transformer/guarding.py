"""Stops fairseq's commands before they lose a run."""

from __future__ import annotations

import logging
import os
import shutil
import sys

from fairseq_posenc.errors import UserError


class _CheckpointGuard(logging.Filter):
    """Stops fairseq before it loses a run, told by what it logs.

    fairseq has no hook between reading ``--restore-file`` and training, nor one before a checkpoint
    is written, but its trainer logs what it is about to do.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        missing = message.partition("No existing checkpoint found ")[2]
        target = message.partition("Saving checkpoint to ")[2]
        if missing:
            _refuse_fresh_start(missing)
        if target and not message.startswith("Finished"):
            _refuse_full_disk(target)
        # The guard needs to hear INFO; the user need not, if LOGLEVEL says so.
        return record.levelno >= logging.getLogger("fairseq").getEffectiveLevel()


def _refuse_fresh_start(path: str) -> None:
    """Refuse to train from random weights where a checkpoint was asked for.

    ``checkpoint_last.pt`` in the save directory, which fairseq has made by then, may be missing:
    that is a first start.
    """
    folder, name = os.path.split(path)
    asked_for = any(path in argument for argument in sys.argv)
    if asked_for or not name.startswith("checkpoint_last") or not os.path.isdir(folder or "."):
        raise UserError(
            f"--restore-file {path} does not exist; training would have started from random weights"
        )


def _refuse_full_disk(path: str) -> None:
    """Refuse to write a checkpoint that will not fit, while the ones before it are still whole.

    fairseq writes the first file of a checkpoint beside the old one, but copies it onto the others
    in place: a disk that fills up there would cost the checkpoint to resume from.
    """
    folder = os.path.dirname(path) or "."
    sizes = [entry.stat().st_size for entry in os.scandir(folder) if entry.name.endswith(".pt")]
    needed = int(1.1 * max(sizes, default=0))
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"no room for a checkpoint in {folder}: it needs about {needed / 1e6:,.0f} MB and "
            f"{free / 1e6:,.0f} MB are free; the checkpoints there are whole. Make room and start "
            "the same command again to go on from the last one."
        )


def guard_checkpoints() -> None:
    """Make fairseq stop at a ``--restore-file`` that does not exist, and at a full disk."""
    trainer = logging.getLogger("fairseq.trainer")
    if not any(isinstance(f, _CheckpointGuard) for f in trainer.filters):
        trainer.setLevel(logging.INFO)
        trainer.addFilter(_CheckpointGuard())
