"""Trainings with ``fairseq-train`` that can be stopped and continued."""

from __future__ import annotations

from pathlib import Path
from typing import Callable

from fairseq_posenc.running.host import USER_DIR
from fairseq_posenc.running.logs import Entry, parse_line
from fairseq_posenc.running.programs import run_logged
from fairseq_posenc.running.steps import Facts
from fairseq_posenc.transformer.adapting import is_position_parameter
from fairseq_posenc.transformer.mending import LAST, ensure_last
from fairseq_posenc.transformer.reading import open_mapped

LOG = "train.log"


def with_user_dir(command: list[str]) -> list[str]:
    """Return the command as it runs: fairseq has to find the package from any folder."""
    return [*command, "--user-dir", str(USER_DIR)]


def train(command: list[str], folder: Path, watch: Callable[[Entry], None], lock: int) -> Facts:
    """Train one model from its last checkpoint, if it has one; return its figures.

    Args:
        command: for a training, but for where it finds the package.
        folder: where the checkpoints are.
        watch: called with every line of figures.
        lock: open file that the training keeps open.

    Raises:
        UserError: the training failed.
    """
    ensure_last(folder)
    run_logged(with_user_dir(command), folder / LOG, lock, read_entries(watch))
    return measure(folder)


def read_entries(watch: Callable[[Entry], None]) -> Callable[[str], None]:
    def read(line: str) -> None:
        if entry := parse_line(line):
            watch(entry)

    return read


def measure(folder: Path) -> Facts:
    """Return the figures of a trained model that its checkpoint holds.

    The time is fairseq's own: of training, validation and writing checkpoints, summed over the
    parts of a training that was continued, without starting up.
    """
    ensure_last(folder)  # it may have been stopped just while fairseq copied it
    state = open_mapped(folder / LAST)
    sizes = {key: value.numel() for key, value in state["model"].items()}
    return {
        "position_parameters": sum(n for key, n in sizes.items() if is_position_parameter(key)),
        "seconds": state["extra_state"]["previous_training_time"],
    }
