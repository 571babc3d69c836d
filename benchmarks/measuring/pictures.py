"""Pictures of time and memory against the length of a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fairseq_posenc.workbench.results.pictures import COLOURS, GRID, look, new_figure, save

PANELS = {"seconds": ("time of a pass, ms", 1e3), "memory": ("peak of memory, MB", 1e-6)}


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw a PNG file: a row of panels for each scope and mode, time and memory side by side."""
    subjects = list(dict.fromkeys((row["scope"], row["mode"]) for row in rows))
    figure = new_figure(11, 4.2 * len(subjects), dpi=120)
    panels = figure.subplots(len(subjects), len(PANELS), squeeze=False)
    for subject, pair in zip(subjects, panels):
        mine = [row for row in rows if (row["scope"], row["mode"]) == subject]
        for (key, (label, unit)), axes in zip(PANELS.items(), pair):
            _draw_panel(axes, mine, key, unit)
            axes.set_title(f"{', '.join(subject)}: {label}", loc="left")
        pair[-1].legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, fontsize=8)
    save(figure, path)


def _draw_panel(axes: Any, rows: list[dict[str, Any]], key: str, unit: float) -> None:
    lines = dict.fromkeys((row["encoding"], row["backend"]) for row in rows)
    for number, (encoding, backend) in enumerate(lines):
        points = sorted(
            (row["length"], row[key] * unit)
            for row in rows
            if (row["encoding"], row["backend"]) == (encoding, backend)
        )
        stock = encoding == "stock"
        style = look(0) if stock else look(number, COLOURS[1:])  # black is fairseq's own
        name = "stock" if stock else f"{encoding} ({backend})"
        axes.plot(*zip(*points), marker="o", markersize=3, label=name, **style)
    lengths = sorted({row["length"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [f"{n:,}" for n in lengths])
    axes.minorticks_off()
    axes.set_xlabel("n")
    axes.grid(color=GRID, linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
