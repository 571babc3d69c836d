"""Draws learning curves: a loss or perplexity over updates, with NaN where a training diverged."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

from fairseq_posenc.workbench.results import pictures
from fairseq_posenc.workbench.results.loss_stages import smooth_losses
from fairseq_posenc.workbench.results.pictures import Line, Points
from fairseq_posenc.workbench.running.logs import Curve, Entry

_MARGIN = 0.08  # room above and below the lines, as a share of their values or their range


def validation_line(curve: Curve) -> Points:
    """Collect the validation perplexity over updates; NaN where the loss is NaN or infinite."""
    return sorted([*curve.points, *_find_gaps(curve.entries)])


def training_line(curve: Curve) -> Points:
    """Compute the smoothed training loss in nats over updates."""
    return sorted([*smooth_losses(curve), *_find_gaps(curve.training)])


def _find_gaps(entries: Iterable[Entry]) -> list[tuple[int, float]]:
    return [(entry.updates, math.nan) for entry in entries if not entry.is_finite]


def draw_curves(lines: Mapping[str, Line], title: str, path: Path, *, log: bool) -> bool:
    """Draw lines over updates into a PNG file.

    ``log`` makes the axis of values logarithmic. Returns False if there was nothing to draw.
    """
    values = [value for line in lines.values() for value in line.values]
    if not values:
        return False
    figure = pictures.new_figure(9, 5.2, dpi=160)
    axes = figure.add_subplot()
    low, high = min(values), max(values)
    room = _MARGIN * (high - low or 1.0)  # equal values need room too
    limits = (low / (1 + _MARGIN), high * (1 + _MARGIN)) if log else (low - room, high + room)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("training updates", color=pictures.GREY)
    pictures.style_values(axes, *limits, log=log)
    digits = 1 if log else 2  # of perplexities, and of losses
    pictures.draw_lines(axes, lines, lambda _, value: f"{value:,.{digits}f}")
    axes.set_title(title, loc="left", fontsize=14)
    pictures.save(figure, path)
    return True
