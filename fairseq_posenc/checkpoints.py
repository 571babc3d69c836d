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
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fairseq_posenc.encodings.distance_table import DistanceTable
from fairseq_posenc.errors import UserError, one_line

logger = logging.getLogger(__name__)
OWN = ".encodings."  # in the name of every position parameter, and in no other
STOCK_SINUSOIDS = ("embed_positions._float_tensor", "embed_positions.weights")
STOCK_OFFSET = 2  # rows before position 0: padding_idx + 1, and fairseq's padding_idx is 1


def is_position_parameter(name: str) -> bool:
    """Return whether a state-dict key belongs to a position encoding."""
    return OWN in name


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Tell in one line why a checkpoint cannot be read.

    Args:
        what: the file, as a user knows it: ``--checkpoint PATH``.

    Raises:
        UserError: whatever went wrong; what torch and fairseq raise depends on what the file holds.
    """
    try:
        yield
    except Exception as error:
        reason = one_line(error) or f"not a whole checkpoint of fairseq ({type(error).__name__})"
        raise UserError(f"{what}: {reason}") from error


def allow_safe_classes() -> None:
    """Let torch load what fairseq's files hold beside tensors and settings.

    That is ``argparse.Namespace``, and numpy's numbers, which scikit-learn's metrics are.
    """
    if hasattr(torch.serialization, "add_safe_globals"):  # torch >= 2.4
        scalar: Any = np.float64(0).__reduce__()[0]  # its module has another name in numpy 1
        number = type(np.dtype(np.float64))
        torch.serialization.add_safe_globals([argparse.Namespace, scalar, np.dtype, number])


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


class PositionCheckpoints(nn.Module):
    """Mixin for models: adapts a checkpoint's position parameters before they are loaded."""

    init_positions: bool = False

    def upgrade_state_dict_named(self, state_dict: dict[str, Any], name: str) -> None:
        """Rename what fairseq's own models call their positions, in place."""
        super().upgrade_state_dict_named(state_dict, name)  # type: ignore[misc]
        for key in [key for key in state_dict if key.endswith("embed_positions.weight")]:
            ours = f"{key[: -len('weight')]}encodings.learned.table.weight"
            state_dict[ours] = state_dict.pop(key)[STOCK_OFFSET:]

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Match the position parameters; torch calls this first, after fairseq pruned layers.

        Raises:
            UserError: they differ and ``--init-positions`` was not given, or the dictionary does.
        """
        _refuse_other_dictionary(state_dict, self.state_dict(prefix=prefix))
        self._extend_tables(state_dict, prefix)
        changes = self._drop_stock_sinusoids(state_dict, prefix)
        own = {k: v for k, v in self.state_dict(prefix=prefix).items() if is_position_parameter(k)}
        changes += _match(state_dict, own)
        if changes and not self.init_positions:
            raise UserError(
                "the checkpoint's positions are not the model's (--init-positions accepts this and "
                f"starts the model's own fresh): {'; '.join(changes)}"
            )
        for change in changes:
            logger.warning("--init-positions: %s", change)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _extend_tables(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Let tables by distance grow with ``--max-positions``: beyond its end a table is clipped.

        Its last rows are repeated, so that every distance keeps the row that it had.
        """
        for name, module in self.named_modules(prefix=prefix.rstrip(".")):
            old = state_dict.get(f"{name}.weight")
            if isinstance(module, DistanceTable) and old is not None:
                new = module.extended(old)
                if new.shape != old.shape:
                    logger.info("%s.weight: its ends are repeated for longer distances", name)
                    state_dict[f"{name}.weight"] = new

    def _drop_stock_sinusoids(self, state_dict: dict[str, Any], prefix: str) -> list[str]:
        """Remove the marks of fairseq's sinusoids; return where the model has other positions."""
        changes = []
        for key in [key for key in state_dict if key.endswith(STOCK_SINUSOIDS)]:
            stack = key.rpartition("embed_positions.")[0]
            del state_dict[key]
            module: Any = self.get_submodule(stack[len(prefix) :].rstrip("."))
            spec = module.spec
            if "sinusoidal(layout=fairseq)" not in map(str, spec.items):
                changes.append(
                    f"{stack}embed_positions are fairseq's sinusoids, which are "
                    f"sinusoidal(layout=fairseq) here, not {spec}"
                )
        return changes


def _refuse_other_dictionary(state_dict: dict[str, Any], own: dict[str, Tensor]) -> None:
    """Refuse token embeddings of another number of symbols; the names are not in a checkpoint."""
    for key in [key for key in state_dict if key.endswith("embed_tokens.weight") and key in own]:
        theirs, ours = (each[key].size(0) for each in (state_dict, own))
        if theirs != ours:
            raise UserError(
                f"the checkpoint has a dictionary of {theirs:,} symbols ({key}), the data one of "
                f"{ours:,}: binarize the data with the dict.txt of its training"
            )


def _match(state_dict: dict[str, Any], own: dict[str, Tensor]) -> list[str]:
    """Give ``state_dict`` the model's own position parameters; return what that changed."""
    theirs = {key: value for key, value in state_dict.items() if is_position_parameter(key)}
    resized = [key for key in own if key in theirs and theirs[key].shape != own[key].shape]
    fresh = [key for key in own if key not in theirs]
    dropped = [key for key in theirs if key not in own]
    for key in dropped:
        del state_dict[key]
    state_dict.update({key: own[key] for key in (*fresh, *resized)})
    return (
        [f"{key} {tuple(own[key].shape)} is not in the checkpoint" for key in fresh]
        + [f"{key} {tuple(theirs[key].shape)} is not in the model" for key in dropped]
        + [
            f"{key} is {tuple(theirs[key].shape)} in the checkpoint, "
            f"{tuple(own[key].shape)} in the model"
            for key in resized
        ]
    )
