"""Draws learning curves: a loss or perplexity over updates, with NaN where a training diverged."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

from fairseq_posenc.workbench.results import pictures
from fairseq_posenc.workbench.results.loss_stages import smooth_losses
from fairseq_posenc.workbench.results.pictures import Means
from fairseq_posenc.workbench.running.logs import Curve, Entry

Points = list[tuple[int, float]]  # updates and values


def validation_line(curve: Curve) -> Points:
    """Collect the validation perplexity over updates; NaN where the loss is NaN or infinite."""
    return sorted([*curve.points, *_find_gaps(curve.entries)])


def training_line(curve: Curve) -> Points:
    """Compute the smoothed training loss in nats over updates."""
    return sorted([*smooth_losses(curve), *_find_gaps(curve.training)])


def _find_gaps(entries: Iterable[Entry]) -> Points:
    return [(entry.updates, math.nan) for entry in entries if not entry.is_finite]


def draw_curves(lines: Mapping[str, Means], title: str, path: Path, *, log: bool) -> bool:
    """Draw lines over updates into a PNG file; return False if there was nothing to draw.

    ``log`` makes the axis of values logarithmic.
    """
    if not any(math.isfinite(y.mean) for means in lines.values() for _, y in means):
        return False
    figure, (axes,) = pictures.new_panels(1, columns=1, panel=(9, 5.2), dpi=160)
    if log:
        pictures.use_log_scale(axes)
    digits = 1 if log else 2  # of perplexities, and of losses
    pictures.draw_means(axes, lines, lambda _, value: f"{value:,.{digits}f}")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("training updates")
    axes.set_title(title, loc="left", fontsize=14)
    pictures.save(figure, path)
    return True
