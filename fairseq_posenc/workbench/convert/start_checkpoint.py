"""A checkpoint that a training starts from, with ``--finetune-from-model``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from fairseq_posenc.errors import UserError
from fairseq_posenc.files import refuse_bad_place
from fairseq_posenc.workbench.loading.checkpoints import write_state


def refuse_existing_output(option: str, out: Path, overwrite: bool) -> None:
    """Refuse to write where something is, unless it may be overwritten, or where nothing can be.

    Raises:
        UserError: says which; ``option`` named the file.
    """
    if out.exists() and not overwrite:
        raise UserError(f"{option} {out} exists: name another file, or add --overwrite")
    refuse_bad_place(out, option)


def write_start_checkpoint(settings: dict[str, Any], weights: dict[str, Tensor], out: Path) -> None:
    """Write what fairseq reads: plain settings, weights, and a training that has not begun."""
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
