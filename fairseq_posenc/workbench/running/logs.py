"""Reads learning curves and speeds from the logs of ``fairseq-train``."""

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

# Lines of figures, by `--log-format`. json: `DATE | INFO | valid | {"valid_loss": "6.97", ...}`.
# simple, or tqdm without a terminal: `DATE | INFO | train_inner | epoch 1: 12 / 133 loss=9.1, ...`
# and `DATE | INFO | valid | epoch 001 | valid on 'valid' subset | loss 6.97 | ...`; tqdm on a
# terminal: the latter alone; none: neither. Under hydra, they begin with `[DATE][valid][INFO] - `.
_LINE = re.compile(r"(?:\| |\[)(train_inner|valid)(?: \||\]\[INFO\] -) (\{.*\}|epoch .*)$")
_FIGURE = re.compile(r'([a-z]\w*)(?:": "?|=| )([^\s,|"}]+)')  # name and value in all forms
TRAIN_LOG = "train.log"  # the log of a training run, beside its checkpoints
NATS_PER_BIT = math.log(2)  # fairseq's losses are in bits, most papers' in nats


class Entry(NamedTuple):
    """The figures in a line of the log (:func:`parse_line`)."""

    kind: str  # `train_inner` or `valid`
    updates: int  # training updates so far; 0 if the line does not say
    loss: float  # in bits: mean since the previous line (training), or over the validation text
    perplexity: float  # of the tokens, without label smoothing; NaN if the loss is not finite
    accuracy: float | None  # of the tokens, in percent; None without a report or a finite loss
    speed: float  # tokens per second; 0 if the line does not say
    figures: Mapping[str, str] = {}  # all figures by name, as text, without the prefix `valid_`

    @property
    def is_finite(self) -> bool:
        """Whether the loss is neither NaN nor infinite."""
        return math.isfinite(self.loss)


class Curve(NamedTuple):
    """The figures in the log of one training run."""

    validations: list[Entry]  # in the order of updates
    speed: float  # tokens per second in training, the median over the lines; 0 without such lines
    training: Sequence[Entry] = ()  # in the order of updates; empty if the log has no such lines

    @property
    def points(self) -> list[tuple[int, float]]:
        """Pairs of updates and validation perplexity; NaN where the loss is NaN or infinite."""
        return [(entry.updates, entry.perplexity) for entry in self.validations]

    @property
    def best(self) -> Entry:
        """The validation with the lowest loss, the best one by fairseq's default metric."""
        # `min` would keep a NaN that comes first, as no number compares as less than NaN.
        return min(self.validations, key=lambda entry: entry.loss if entry.is_finite else math.inf)


def parse_line(text: str) -> Entry | None:
    """Read the figures in a line of a log, in any format; None if it has no loss."""
    if (match := _LINE.search(text.rstrip())) is None:
        return None
    figures = {name.removeprefix("valid_"): value for name, value in _FIGURE.findall(match[2])}
    try:
        is_finite = math.isfinite(loss := float(figures["loss"]))
        bits = float(figures.get("nll_loss", loss)) if is_finite else math.nan
        return Entry(
            kind=match[1],
            updates=int(float(figures.get("num_updates", 0))),
            loss=loss,
            perplexity=2.0 ** min(bits, 1000.0),  # more would overflow
            accuracy=float(figures["accuracy"]) if is_finite and "accuracy" in figures else None,
            speed=float(figures.get("wps", 0)),
            figures=figures,
        )
    except (KeyError, ValueError, OverflowError):
        return None  # the line is cut off, or not fairseq's


def read_curve_file(log: Path) -> Curve:
    """Read the log of one training run.

    A run that was stopped repeats the updates since its last checkpoint; the later line wins.
    """
    with open(log, encoding="utf-8", errors="replace") as lines:
        latest = {(entry.updates, entry.kind): entry for entry in map(parse_line, lines) if entry}
    entries = [latest[key] for key in sorted(latest)]
    training, validations = ([x for x in entries if x.kind == k] for k in ("train_inner", "valid"))
    return Curve(validations, statistics.median([x.speed for x in training] or [0.0]), training)
