"""Loading: stock fairseq checkpoints, and checkpoints whose position parameters differ.

Also what fairseq's commands need to load at all: torch reads only tensors and plain settings from a
checkpoint (``weights_only``), and fairseq writes ``argparse.Namespace`` into it. Allowing that one
class makes every command work while a file that would run code is still refused.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_posenc.errors import UserError

logger = logging.getLogger(__name__)
OWN = ".encodings."  # in the name of every position parameter, and in no other
STOCK_OFFSET = 2  # rows before position 0: padding_idx + 1, and fairseq's padding_idx is 1


def is_position_parameter(name: str) -> bool:
    """Return whether a state-dict key belongs to a position encoding."""
    return OWN in name


def allow_safe_classes() -> None:
    """Let torch load the one class, beside tensors and settings, that fairseq's files hold."""
    if hasattr(torch.serialization, "add_safe_globals"):  # torch >= 2.4
        torch.serialization.add_safe_globals([argparse.Namespace])


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
        return True


def _refuse_fresh_start(path: str) -> None:
    """Refuse to train from random weights where a checkpoint was asked for.

    The default, ``checkpoint_last.pt``, may be missing: that is a first start.
    """
    if not os.path.basename(path).startswith("checkpoint_last"):
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
        trainer.addFilter(_CheckpointGuard())


class PositionCheckpoints(nn.Module):
    """Mixin for models: adapts a checkpoint's position parameters before they are loaded."""

    init_positions: bool = False

    def upgrade_state_dict_named(self, state_dict: dict[str, Any], name: str) -> None:
        """Bring ``state_dict`` into this model's form, in place.

        Raises:
            UserError: the position parameters differ and ``--init-positions`` was not given.
        """
        super().upgrade_state_dict_named(state_dict, name)  # type: ignore[misc]
        values = self.state_dict(prefix=f"{name}." if name else "")
        own = {key: value for key, value in values.items() if is_position_parameter(key)}
        _import_stock_positions(state_dict)
        self._match_positions(state_dict, own)

    def _match_positions(self, state_dict: dict[str, Any], own: dict[str, Tensor]) -> None:
        theirs = {key for key in state_dict if is_position_parameter(key)}
        fresh = [key for key in own if key not in theirs]
        dropped = sorted(theirs - own.keys())
        resized = [key for key in own if key in theirs and state_dict[key].shape != own[key].shape]
        if not (fresh or dropped or resized):
            return
        changes = (
            [f"{key} {tuple(own[key].shape)} is not in the checkpoint" for key in fresh]
            + [f"{key} {tuple(state_dict[key].shape)} is not in the model" for key in dropped]
            + [
                f"{key} is {tuple(state_dict[key].shape)} in the checkpoint, "
                f"{tuple(own[key].shape)} in the model"
                for key in resized
            ]
        )
        if not self.init_positions:
            raise UserError(
                "the checkpoint's position parameters are not the model's (--init-positions "
                f"accepts this and starts the model's own fresh): {'; '.join(changes)}"
            )
        for change in changes:
            logger.warning("--init-positions: %s", change)
        for key in (*dropped, *resized):
            del state_dict[key]
        state_dict.update({key: own[key] for key in (*fresh, *resized)})


def _import_stock_positions(state_dict: dict[str, Any]) -> None:
    """Rename fairseq's own learned positions, and cut off its rows before position 0."""
    for key in [key for key in state_dict if key.endswith("embed_positions.weight")]:
        ours = f"{key[: -len('weight')]}encodings.learned.table.weight"
        state_dict[ours] = state_dict.pop(key)[STOCK_OFFSET:]
    for key in [key for key in state_dict if key.endswith("embed_positions._float_tensor")]:
        del state_dict[key]  # of fairseq's sinusoids; it holds nothing
