"""Learning curves and speeds, read from the log of ``fairseq-train``."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Optional

# `--log-format json` writes lines such as `DATE | INFO | valid | {"valid_loss": "6.97", ...}`,
# the other formats `DATE | INFO | valid | epoch 001 | valid on 'valid' subset | loss 6.97 | ...`
# and `DATE | INFO | train_inner | epoch 001: 12 / 133 loss=9.1, ups=2.5, ...`. Under hydra they
# begin with `[DATE][valid][INFO] - `.
_KIND = r"(?:\| |\[)(train_inner|valid)(?: \||\]\[INFO\] -) "
_JSON = re.compile(_KIND + r"(\{.*\})\s*$")
_VALID = re.compile(_KIND + r"epoch (\d+) \| valid on .*? subset \|(.*)$")
_TRAIN = re.compile(_KIND + r"epoch (\d+): +\d+ / \d+ (.*)$")


class Entry(NamedTuple):
    """One line of figures in a log.

    Attributes:
        kind: ``train_inner`` or ``valid``.
        updates: training updates so far; 0 where the line does not tell.
        loss: in bits, since the line before (training), or over the whole validation text.
        perplexity: of the tokens; a label-smoothed loss is not what it is computed from.
        accuracy: of the tokens, in percent; None if the training does not report it.
        speed: tokens per second.
        epoch: the one it was written in, from 1 on; 0 where the line does not tell.
    """

    kind: str
    updates: int
    loss: float
    perplexity: float
    accuracy: Optional[float]
    speed: float
    epoch: int = 0

    @property
    def is_finite(self) -> bool:
        """Whether its loss is a number: neither NaN nor infinite."""
        return math.isfinite(self.loss)

    @property
    def nats(self) -> float:
        """The loss in nats, as papers have it."""
        return in_nats(self.loss)


def in_nats(bits: float) -> float:
    """Return a loss of fairseq's, which are in bits, in nats."""
    return bits * math.log(2)


class Curve(NamedTuple):
    """What the log of one training tells.

    Attributes:
        entries: those of validation, in the order of updates.
        speed: tokens per second in training, the median over the log's lines.
        training: the entries of training, in the order of updates.
    """

    entries: list[Entry]
    speed: float
    training: Sequence[Entry] = ()

    @property
    def points(self) -> list[tuple[int, float]]:
        """Pairs of updates and validation perplexity, without losses that are no number."""
        return [(entry.updates, entry.perplexity) for entry in self.entries if entry.is_finite]

    @property
    def best(self) -> Entry:
        """The validation of the lowest loss, that of ``checkpoint_best.pt``."""
        # NaN compares as neither less nor more, so one would hide all that come after it.
        return min(self.entries, key=lambda entry: entry.loss if entry.is_finite else math.inf)

    @property
    def epochs(self) -> dict[int, Entry]:
        """The last validation of each epoch, without losses that are no number."""
        return {entry.epoch: entry for entry in self.entries if entry.is_finite and entry.epoch}

    def first_below(self, perplexity: float) -> Optional[int]:
        """Return the updates of the first point at or below a perplexity, None if there is none."""
        return next((updates for updates, value in self.points if value <= perplexity), None)


def parse_line(line: str) -> Optional[Entry]:
    """Return the figures of a line of the log, None if it has none."""
    kind, epoch, figures = _figures(line)
    if not figures:
        return None
    loss = float(figures.get("loss", "nan"))
    accuracy = figures.get("accuracy")
    return Entry(
        kind,
        int(float(figures.get("num_updates", 0))),
        loss,
        2.0 ** min(float(figures.get("nll_loss", loss)), 1000.0),  # fairseq's losses are in bits
        None if accuracy is None else float(accuracy),
        float(figures.get("wps", 0)),
        int(epoch),
    )


def _figures(line: str) -> tuple[str, str, dict[str, str]]:
    """Return the kind of a line, its epoch, and its figures by name."""
    if found := _JSON.search(line):
        try:
            figures = json.loads(found[2])
        except ValueError:  # a line cut off when the training was stopped
            return "", "0", {}
        epoch = figures.get("epoch", "0")
        return found[1], epoch, {name.removeprefix("valid_"): v for name, v in figures.items()}
    if found := _VALID.search(line):
        pairs = (part.split() for part in found[3].split("|"))
        return "valid", found[2], {pair[0]: pair[1] for pair in pairs if len(pair) > 1}
    if found := _TRAIN.search(line):
        figures = dict(part.split("=", 1) for part in found[3].strip().split(", "))
        return "train_inner", found[2], figures
    return "", "0", {}


def read_curve(lines: Iterable[str]) -> Curve:
    """Read a whole log.

    A training that was stopped repeats the updates since its last checkpoint; the later line wins.
    """
    entries = [entry for entry in map(parse_line, lines) if entry is not None]
    validations = {entry.updates: entry for entry in entries if entry.kind == "valid"}
    trainings = {entry.updates: entry for entry in entries if entry.kind == "train_inner"}
    training = [trainings[updates] for updates in sorted(trainings)]
    return Curve(
        [validations[updates] for updates in sorted(validations)],
        statistics.median(entry.speed for entry in training) if training else 0.0,
        training,
    )


def read_curve_file(log: Path) -> Curve:
    """Read the log file of one training."""
    with open(log, encoding="utf-8", errors="replace") as lines:
        return read_curve(lines)
