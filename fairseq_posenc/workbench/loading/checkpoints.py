"""Loads and writes checkpoints, and reads their number of updates."""

import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from fairseq import checkpoint_utils
from torch import Tensor

from fairseq_posenc.checkpoints.faults import BUILD_ERRORS, quote_error
from fairseq_posenc.checkpoints.recovery import LAST, read_if_whole
from fairseq_posenc.checkpoints.safe_loading import forget_files, open_checkpoint, refuse_incomplete
from fairseq_posenc.errors import UserError
from fairseq_posenc.files import written_whole

State = dict[str, Any]  # the content of a checkpoint


def load_state(path: Path, option: str) -> State:
    """Load a checkpoint, with its settings upgraded to those of this fairseq.

    The optimizer's state is left out. Settings that name other files are set to None: those files
    may be gone.

    Args:
        path: the checkpoint.
        option: the option that named it, or ""; messages begin with it.

    Raises:
        UserError: the path is not a file, or not a whole checkpoint of fairseq.
    """
    if path.is_dir():
        why = "a folder without a checkpoint (*.pt), and without the config.json of transformers"
        if (path / "config.json").is_file():
            why = "a folder of transformers, and this command reads a checkpoint of fairseq"
        elif checkpoints := sorted(path.glob("*.pt")):
            why = f"a folder; name a checkpoint in it, such as {checkpoints[0]}"
        raise UserError(f"{option} {path}: {why}".lstrip())
    if not path.is_file():
        raise UserError(f"{option} {path}: no such file".lstrip())
    with (
        open_checkpoint(path, option) as state,  # errors in this block name the file
        tempfile.TemporaryFile() as file,  # which a kill does not leave behind
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # hydra warns about fairseq's configuration
        forget_files(state)  # the settings that name files
        refuse_incomplete(state)  # such as weights alone
        # fairseq upgrades only what it reads from a file; the tensors need not be written to it.
        torch.save({**state, "last_optimizer_state": None, "model": {}}, file)
        file.seek(0)
        upgraded: State = checkpoint_utils.load_checkpoint_to_cpu(f"/dev/fd/{file.fileno()}")
        upgraded["model"] = state["model"]
        # If a section is missing, this line raises.
        _ = upgraded["cfg"].model, upgraded["cfg"].task
    return upgraded


@contextmanager
def refuse_unusable_settings(option: str, path: Path) -> Iterator[None]:
    """Turn errors of building a task or model from settings into a line with the checkpoint's path.

    These are ``BUILD_ERRORS``. The line begins with ``option``, which named the checkpoint.
    """
    label = f"{option} {path}".lstrip()
    try:
        yield
    except UserError as error:
        if str(path) in str(error):
            raise
        raise UserError(f"{label}: {error}") from error
    except BUILD_ERRORS as error:
        fault = f"no model can be built from its settings: {quote_error(error)}"
        raise UserError(f"{label}: {fault}") from error


def write_state(state: State, path: Path) -> None:
    """Write a checkpoint atomically; refuse a path that cannot be a file."""
    # The file is opened here, because torch's own error would not say that the disk is full.
    with written_whole(path) as temporary, open(temporary, "wb") as file:
        torch.save(state, file)


def write_start_checkpoint(settings: dict[str, Any], weights: dict[str, Tensor], out: Path) -> None:
    """Write a checkpoint of settings and weights from which training can start, at update 0.

    fairseq looks up all these keys when it loads a checkpoint, even those without content.
    """
    state = {
        "cfg": settings,
        "model": weights,
        "optimizer_history": [{"lr_scheduler_state": {}, "num_updates": 0}],
        "last_optimizer_state": None,
        "extra_state": {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0, "shuffle": True}},
    }
    write_state(state, out)


def read_updates(state: State) -> int:
    """Read the number of updates of a checkpoint; 0 if none is recorded."""
    history = state.get("optimizer_history") or [{}]
    return int(history[-1].get("num_updates", 0))


def updates_done(folder: Path) -> int:
    """Read the number of updates of ``checkpoint_last.pt``; 0 if it is missing or not whole."""
    return last.updates if (last := read_if_whole(folder / LAST)) else 0
