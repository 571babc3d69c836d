"""Draws learning curves: a loss or perplexity over updates, and where a training diverged."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

from fairseq_posenc.workbench.results import pictures
from fairseq_posenc.workbench.results.loss_stages import smooth_losses
from fairseq_posenc.workbench.running.logs import Curve, Entry

Points = Sequence[tuple[int, float]]  # updates and values; NaN if the loss was NaN or infinite
Band = Sequence[tuple[int, float, float]]  # updates, lower and upper bounds
_LABEL_HEIGHT = 0.055  # height of a label at the end of a line, as a share of the axes' height
_MARGIN = 1.08  # factor of the room above and below the lines


def validation_line(curve: Curve) -> Points:
    """Collect the validation perplexity over updates."""
    return sorted([*curve.points, *_find_gaps(curve.entries)])


def training_line(curve: Curve) -> Points:
    """Compute the smoothed training loss in nats over updates."""
    return sorted([*smooth_losses(curve), *_find_gaps(curve.training)])


def _find_gaps(entries: Iterable[Entry]) -> list[tuple[int, float]]:
    return [(entry.updates, math.nan) for entry in entries if not entry.is_finite]


def draw_lines(
    lines: Mapping[str, Points],
    title: str,
    path: Path,
    log: bool,
    bands: Optional[Mapping[str, Band]] = None,
    dots: Optional[Mapping[str, Points]] = None,
) -> bool:
    """Draw lines over updates, with labels at their ends, into a PNG file.

    NaN and infinite values leave a gap, with a cross above the first. If a line ends with them, its
    label says at which update the training diverged.

    Args:
        lines: values over updates by name.
        title: title of the picture.
        path: the file.
        log: whether the axis of values is logarithmic.
        bands: intervals around the lines by name.
        dots: values of single seeds by name.

    Returns:
        Whether there was anything to draw.
    """
    bands = {  # points with too few seeds have infinite bounds
        name: [point for point in band if all(map(math.isfinite, point))]
        for name, band in (bands or {}).items()
    }
    dots = dots or {}
    values = [y for line in (*lines.values(), *dots.values()) for _, y in line]
    values += [y for band in bands.values() for point in band for y in point[1:]]
    values = [y for y in values if math.isfinite(y)]
    if not values:
        return False
    figure = pictures.new_figure(9, 5.2, dpi=160)
    axes = figure.add_subplot()
    low, high = min(values), max(values)
    room = (high - low or 1.0) * (_MARGIN - 1)
    limits = (low / _MARGIN, high * _MARGIN) if log else (low - room, high + room)
    _style_updates(axes, [x for line in lines.values() for x, _ in line])
    pictures.style_values(axes, *limits, log)
    ends = []
    styles = pictures.assign_styles(list(lines))
    for name, line in lines.items():
        if line:
            ends.append(_draw_line(axes, name, line, styles[name]))
            colour = styles[name]["color"]
            if band := bands.get(name):
                axes.fill_between(*zip(*band), color=colour, alpha=0.15, linewidth=0)
            if finite := [point for point in dots.get(name, ()) if math.isfinite(point[1])]:
                axes.plot(*zip(*finite), "o", color=colour, ms=2.5, alpha=0.6, mew=0)
    pictures.label_ends(axes, ends, _LABEL_HEIGHT)
    axes.set_title(title, loc="left", fontsize=14, pad=14)
    figure.get_layout_engine().set(w_pad=0.15, h_pad=0.15)
    pictures.save(figure, path)
    return True


def _draw_line(axes: Any, name: str, line: Points, style: Mapping[str, str]) -> pictures.LineEnd:
    """Draw a line; return its label."""
    axes.plot(*zip(*((x, y if math.isfinite(y) else math.nan) for x, y in line)), **style, lw=2.2)
    broken = [x for x, y in line if not math.isfinite(y)]
    if broken:
        transform, colour = axes.get_xaxis_transform(), style["color"]
        axes.plot(broken[0], 1.0, "X", color=colour, ms=9, transform=transform, clip_on=False)
    update, end = line[-1]
    if not math.isfinite(end):
        finite = max((x for x, y in line if math.isfinite(y)), default=-1)
        update = next(x for x in broken if x > finite)
        return pictures.LineEnd(f"{name}  diverged at {update:,}", 1.0, style["color"])
    digits = 1 if axes.get_yscale() == "log" else 2
    height = pictures.axes_height(axes, update, end)
    return pictures.LineEnd(f"{name}  {end:,.{digits}f}", height, style["color"])


def _style_updates(axes: Any, updates: Sequence[int]) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_xlabel("training updates", color=pictures.GREY, fontsize=11)
    # The axis begins at zero, unless all lines begin after an eighth of the updates.
    first, last = min(updates), max(updates)
    axes.set_xlim(first if last / 8 < first < last else 0, max(last, 1))
    axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 2.5, 5, 10], integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.tick_params(labelsize=11)
