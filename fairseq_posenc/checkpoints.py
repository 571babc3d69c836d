"""Loading: stock fairseq checkpoints, and checkpoints whose position parameters differ.

Also what fairseq's commands need to load at all: torch reads only tensors and plain settings from a
checkpoint (``weights_only``), and fairseq writes ``argparse.Namespace`` into it. Allowing that one
class makes every command work while a file that would run code is still refused.
"""

from __future__ import annotations

import argparse
import logging
import os
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


class _MissingCheckpoint(logging.Filter):
    """Turns fairseq's remark that a checkpoint to restore does not exist into an error.

    fairseq would go on from random weights. It has no hook between reading ``--restore-file`` and
    training, but it logs what it looked for; the default, ``checkpoint_last.pt``, may be missing.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if message.startswith("No existing checkpoint found "):
            path = message.split("No existing checkpoint found ")[1]
            if not os.path.basename(path).startswith("checkpoint_last"):
                raise UserError(
                    f"--restore-file {path} does not exist; training would have started from "
                    "random weights"
                )
        return True


def refuse_missing_restore_file() -> None:
    """Make fairseq stop when the file given as ``--restore-file`` does not exist."""
    trainer = logging.getLogger("fairseq.trainer")
    if not any(isinstance(f, _MissingCheckpoint) for f in trainer.filters):
        trainer.addFilter(_MissingCheckpoint())


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
