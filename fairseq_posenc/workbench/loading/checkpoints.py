"""Loads and writes checkpoints, and reads how far their training is."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from fairseq import checkpoint_utils
from torch import Tensor

from fairseq_posenc.checkpoints.error_messages import UNBUILDABLE, quote_error
from fairseq_posenc.checkpoints.recovery import newest_checkpoint
from fairseq_posenc.checkpoints.safe_loading import open_checkpoint
from fairseq_posenc.checkpoints.trusted_settings import forget_files, refuse_files
from fairseq_posenc.errors import UserError
from fairseq_posenc.files import refuse_bad_place, written_whole
from fairseq_posenc.workbench.running import host  # noqa: F401  (registers models and tasks)

State = dict[str, Any]
_TENSORS = ("model", "last_optimizer_state")


def load_state(path: Path, what: str, for_fairseq: bool = False) -> State:
    """Load a checkpoint as fairseq of today would have written it, but for old names of weights.

    Its tensors are mapped into memory, so that nobody reads what is not used: two thirds of a file
    are the optimizer's. Messages begin with ``what``, as the option that named the file. With
    ``for_fairseq``, settings that name files are refused, and not taken away.

    Raises:
        UserError: it is not a file, or no whole checkpoint of fairseq.
    """
    if not path.is_file():
        raise UserError(f"{what} {path}: no such file")
    with open_checkpoint(path, what, for_weights=True) as state, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # hydra's, about fairseq's configuration
        (refuse_files if for_fairseq else forget_files)(state)
        upgraded = _upgrade_settings({**state, "last_optimizer_state": None, "model": {}})
        upgraded.update({name: state.get(name) for name in _TENSORS})
        _ = upgraded["cfg"].model, upgraded["cfg"].task, state["model"]
    return upgraded


def _upgrade_settings(state: State) -> State:
    """Upgrade settings as fairseq does, which it does for files alone."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "settings.pt")
        torch.save(state, path)
        upgraded: State = checkpoint_utils.load_checkpoint_to_cpu(str(path))
    return upgraded


@contextmanager
def refuse_unusable_settings(place: str) -> Iterator[None]:
    """Report errors of fairseq while it builds something from settings in one line."""
    try:
        yield
    except UserError as error:
        if str(error).startswith("the checkpoint"):  # of code that does not know its file
            raise UserError(f"{place}: {error}") from error
        raise
    except UNBUILDABLE as error:
        reason = quote_error(error)
        raise UserError(f"{place}: no model can be built of its settings: {reason}") from error


def write_state(state: State, path: Path) -> None:
    """Write a checkpoint so that an interruption leaves the old file or the new one.

    Raises:
        UserError: the place is not one for a file.
    """
    # Into an open file: where torch opens it, a full disk is an error that does not say so.
    with written_whole(path) as temporary, open(temporary, "wb") as file:
        torch.save(state, file)


def refuse_existing_output(option: str, out: Path, overwrite: bool) -> None:
    """Refuse an existing file, unless it may be overwritten, or a place that cannot be a file.

    Raises:
        UserError: says which; ``option`` named the file.
    """
    if out.exists() and not overwrite:
        raise UserError(f"{option} {out} exists: name another file, or add --overwrite")
    refuse_bad_place(out, option)


def write_start_checkpoint(settings: dict[str, Any], weights: dict[str, Tensor], out: Path) -> None:
    """Write a checkpoint of plain settings and weights, whose training has not begun."""
    not_begun = {
        "criterion_name": "",
        "optimizer_name": "",
        "lr_scheduler_state": {},
        "num_updates": 0,
    }
    state = {
        "args": None,
        "cfg": settings,
        "model": weights,
        "criterion": None,
        "optimizer_history": [not_begun],
        "last_optimizer_state": None,
        "task_state": {},
        "extra_state": {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0, "shuffle": True}},
    }
    write_state(state, out)


def read_updates(state: State) -> int:
    """Read the training updates of a checkpoint, 0 if it does not have them."""
    history = state.get("optimizer_history") or [{}]
    return int(history[-1].get("num_updates", 0))


def updates_done(folder: Path) -> int:
    """Read the updates of a training's newest whole checkpoint, 0 if it has none."""
    newest = newest_checkpoint(folder)
    return newest.updates if newest else 0
