"""One model: training that can be stopped and continued, and validation."""

from __future__ import annotations

from pathlib import Path

from fairseq_posenc.compare.contenders import Contender
from fairseq_posenc.compare.settings import TRAIN_OPTIONS, WHOLE, Settings
from fairseq_posenc.errors import UserError
from fairseq_posenc.running.logs import Entry
from fairseq_posenc.running.programs import run_logged
from fairseq_posenc.running.steps import Facts
from fairseq_posenc.running.trainings import read_entries, with_user_dir
from fairseq_posenc.transformer.mending import LAST

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


def validate(command: list[str], log: Path, lock: int) -> Facts:
    """Measure one trained model on the validation text with ``fairseq-validate``.

    Raises:
        UserError: the command failed, or its output has no figure.
    """
    found: list[Entry] = []
    run_logged(with_user_dir(command), log, lock, read_entries(found.append))
    if not found:
        raise UserError(f"fairseq-validate printed no perplexity; see its log {log}")
    return {"perplexity": found[-1].perplexity}
