"""Pictures of encodings: how the score changes with the distance."""

from __future__ import annotations

from pathlib import Path

import torch
from matplotlib.figure import Figure

from fairseq_posenc import registry
from fairseq_posenc.api import PositionEncoding

REACH = 32


def draw_curve(name: str, path: Path) -> None:
    """Draw an encoding's distance curve, a line for each of four heads, as SVG or PNG.

    Trained tables are drawn from a fixed seed with standard deviation 0.5: at their true start
    they would be flat, and the picture is about their form.
    """
    causal = name not in registry.names_for(encoder=True)
    encoding = PositionEncoding(name, 64, 4, max_positions=2 * REACH + 1, causal=causal)
    generator = torch.Generator().manual_seed(1)
    for parameter in encoding.parameters():
        parameter.data.normal_(std=0.5, generator=generator)
    curves = encoding.distance_curve(REACH)
    distances = torch.arange(-REACH, 1 if causal else REACH + 1)
    figure = Figure(figsize=(5, 2.6), layout="constrained")
    axes = figure.subplots()
    for head, curve in enumerate(curves):
        axes.plot(distances, curve[: len(distances)], lw=1.3, alpha=0.85, label=f"head {head + 1}")
    axes.axvline(0, color="0.8", lw=0.8, zorder=0)
    axes.set(xlabel="distance j - i", ylabel="mean score of equal contents")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=7, ncols=4, loc="upper center", bbox_to_anchor=(0.5, 1.16))
    # Without a date, so that the same numbers give the same file.
    figure.savefig(path, dpi=110, metadata={"Software": None})
