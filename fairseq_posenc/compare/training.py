"""One model: training that can be stopped and continued, and validation."""

from __future__ import annotations

from pathlib import Path
from typing import Callable

from fairseq_posenc.compare.contenders import Contender
from fairseq_posenc.compare.settings import TRAIN_OPTIONS, WHOLE, Settings
from fairseq_posenc.errors import UserError
from fairseq_posenc.running.host import USER_DIR
from fairseq_posenc.running.logs import Entry, parse_line
from fairseq_posenc.running.programs import run_logged
from fairseq_posenc.running.steps import Facts
from fairseq_posenc.transformer.adapting import is_position_parameter
from fairseq_posenc.transformer.mending import LAST, ensure_last
from fairseq_posenc.transformer.reading import open_mapped

LOG = "train.log"
# Beyond any run: validation and checkpoints are counted in updates, not in rounds of the data.
_NEVER = "1000000000"


def train_command(data: Path, folder: Path, contender: Contender, settings: Settings) -> list[str]:
    """Return the command that trains one model, but for where it finds the package."""
    every = str(settings.validate_every)
    return [
        *("fairseq-train", str(data), *TRAIN_OPTIONS, *contender.options),
        *("--max-update", str(settings.updates), "--seed", str(settings.seed)),
        *("--save-dir", str(folder), "--save-interval-updates", every),
        *("--validate-interval-updates", every, "--keep-interval-updates", "1"),
        *("--no-epoch-checkpoints", "--save-interval", _NEVER, "--validate-interval", _NEVER),
        *("--log-format", "json", "--log-interval", str(settings.log_every)),
        *("--num-workers", "0", "--distributed-world-size", "1"),
        *settings.train_args,
    ]


def validate_command(data: Path, folder: Path, settings: Settings) -> list[str]:
    """Return the command that measures one trained model, but for where it finds the package."""
    return [
        *("fairseq-validate", str(data), "--task", "masked_lm", "--path", str(folder / LAST)),
        *("--max-tokens", settings.option("--max-tokens"), *WHOLE),
        *("--log-format", "json"),
        *("--num-workers", "0", "--distributed-world-size", "1"),
    ]


def with_user_dir(command: list[str]) -> list[str]:
    """Return the command as it runs: fairseq has to find the package from any folder."""
    return [*command, "--user-dir", str(USER_DIR)]


def train(command: list[str], folder: Path, watch: Callable[[Entry], None], lock: int) -> Facts:
    """Train one model from its last checkpoint, if it has one; return its figures.

    Args:
        command: what :func:`train_command` returns.
        folder: where the checkpoints are.
        watch: called with every line of figures.
        lock: open file that the training keeps open.

    Raises:
        UserError: the training failed.
    """
    ensure_last(folder)
    run_logged(with_user_dir(command), folder / LOG, lock, _reader(watch))
    return measure(folder)


def _reader(watch: Callable[[Entry], None]) -> Callable[[str], None]:
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


def validate(command: list[str], log: Path, lock: int) -> Facts:
    """Measure one trained model on the validation text with ``fairseq-validate``.

    Raises:
        UserError: the command failed, or its output has no figure.
    """
    found: list[Entry] = []
    run_logged(with_user_dir(command), log, lock, _reader(found.append))
    if not found:
        raise UserError(f"fairseq-validate printed no perplexity; see its log {log}")
    return {"perplexity": found[-1].perplexity}
