"""Learning curves and speeds, read from the log of ``fairseq-train``."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, Optional

# `--log-format json` writes lines such as `DATE | INFO | valid | {"valid_loss": "6.97", ...}`.
_ENTRY = re.compile(r"\| (train_inner|valid) \| (\{.*\})\s*$")


class Entry(NamedTuple):
    """One line of figures in a log.

    Attributes:
        kind: ``train_inner`` or ``valid``.
        updates: training updates so far; 0 where the line does not tell.
        perplexity: since the line before (training), or over the whole validation text.
        speed: tokens per second.
    """

    kind: str
    updates: int
    perplexity: float
    speed: float


class Curve(NamedTuple):
    """What the log of one training tells.

    Attributes:
        points: pairs of updates and validation perplexity, in order.
        speed: tokens per second in training, the median over the log's lines.
    """

    points: list[tuple[int, float]]
    speed: float

    def first_below(self, perplexity: float) -> Optional[int]:
        """Return the updates of the first point at or below a perplexity, None if there is none."""
        return next((updates for updates, value in self.points if value <= perplexity), None)


def parse_line(line: str) -> Optional[Entry]:
    """Return the figures of a line of the log, None if it has none."""
    found = _ENTRY.search(line)
    if found is None:
        return None
    try:
        figures = json.loads(found[2])
    except ValueError:  # a line cut off when the training was stopped
        return None
    kind, prefix = found[1], "valid_" if found[1] == "valid" else ""
    loss = float(figures.get(f"{prefix}loss", "nan"))
    return Entry(
        kind,
        int(figures.get(f"{prefix}num_updates", 0)),
        2.0 ** min(loss, 1000.0),  # fairseq's losses are in bits
        float(figures.get(f"{prefix}wps", 0)),
    )


def read_curve(lines: Iterable[str]) -> Curve:
    """Read a whole log.

    A training that was stopped repeats the updates since its last checkpoint; the later line wins.
    """
    entries = [entry for entry in map(parse_line, lines) if entry is not None]
    points = {entry.updates: entry.perplexity for entry in entries if entry.kind == "valid"}
    speeds = {entry.updates: entry.speed for entry in entries if entry.kind == "train_inner"}
    return Curve(sorted(points.items()), statistics.median(speeds.values()) if speeds else 0.0)


def read_curve_file(log: Path) -> Curve:
    """Read the log file of one training."""
    with open(log, encoding="utf-8", errors="replace") as lines:
        return read_curve(lines)
