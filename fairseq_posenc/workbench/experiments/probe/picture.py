"""Draws shares of right answers: over length, over updates, and over depth and length."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fairseq_posenc.workbench.experiments.outcomes import Outcome
from fairseq_posenc.workbench.experiments.probe import report
from fairseq_posenc.workbench.experiments.probe.data import DEPTHS
from fairseq_posenc.workbench.experiments.probe.experiment import TaskResults
from fairseq_posenc.workbench.results import pictures
from fairseq_posenc.workbench.results.intervals import interval_of_share
from fairseq_posenc.workbench.results.pictures import GREY, PALE, Points

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLUMNS = 3  # most panels in a row


def draw_all(results: TaskResults) -> dict[str, str]:
    """Draw all pictures of a probe into its folder; return their file names by title."""
    out = results.experiment.out
    draw_lengths(results, out / report.PICTURE)
    draw_learning(results, out / report.LEARNING)
    drawn = {
        "Share of right answers over the questions' length": report.PICTURE,
        "Share of right answers over the updates": report.LEARNING,
    }
    for task in results.experiment.tasks:
        if task.has_depth:
            name = report.DEPTH_PICTURES[task.name]
            draw_depths(results, task.name, out / name)
            drawn[f"{task.name}: share of right answers over depth and length"] = name
    return drawn


def draw_depths(results: TaskResults, task: str, path: Path) -> None:
    """Draw a map of depth and length for each model, of a task that has depths, as PNG."""
    lengths = sorted(results.experiment.lengths)
    maps = {
        model.name: [
            [report.share_at_depth(results, task, model, n, depth).mean for n in lengths]
            for depth in DEPTHS
        ]
        for model in results.experiment.variants
    }
    figure = draw_depth_maps(maps, lengths, DEPTHS)
    border = len(results.experiment.within) - 0.5  # between the columns of two lengths
    for axes in figure.axes[: len(maps)]:  # the last axes are the colour bar
        axes.axvline(border, color="white", linestyle=":")
    figure.supxlabel("length in words (dotted: longest in training)", color=GREY)
    figure.supylabel("depth of the needle", color=GREY)
    pictures.save(figure, path)


def draw_depth_maps(
    maps: Mapping[str, Sequence[Sequence[float]]], lengths: Sequence[int], depths: Sequence[float]
) -> Figure:
    """Draw a map of shares by model, with a row for each depth and a column for each length."""
    figure, panels = pictures.new_panels(
        len(maps), _COLUMNS, panel=(3.6, 2.2), margin=(1.0, 0.6), sharex=True, sharey=True
    )
    for axes, (name, shares) in zip(panels, maps.items()):
        image = axes.imshow(shares, vmin=0, vmax=1, cmap="viridis", aspect="auto")
        axes.set_title(name, loc="left", fontsize=11)
        axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], fontsize=8)
        axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths], fontsize=8)
    # All images have the same scale, so the last one stands for all.
    figure.colorbar(image, ax=panels, label="share of right answers", shrink=0.8)
    return figure


def draw_lengths(results: TaskResults, path: Path) -> None:
    """Draw right answers over the length of the question, a panel for each task, as PNG."""
    lengths = sorted(results.experiment.lengths)
    label = "length of the question, in words (dotted: longest in training)"
    figure = _draw_tasks(
        results, lambda outcome: [(n, report.read_share(outcome, n)) for n in lengths], label
    )
    for axes in figure.axes:
        axes.axvline(results.experiment.trained, color=PALE, linestyle=":", linewidth=1.2, zorder=0)
    pictures.save(figure, path)


def draw_learning(results: TaskResults, path: Path) -> None:
    """Draw right answers over the updates of training, a panel for each task, as PNG."""
    label = "updates; questions as in training"
    pictures.save(_draw_tasks(results, report.learning_curve, label), path)


def _draw_tasks(
    results: TaskResults, collect_points: Callable[[Outcome], Points], label: str
) -> Figure:
    """Draw a panel for each task and a line for each model, from the points of each training."""
    tasks = results.experiment.tasks
    styles = {name: pictures.line_style(n) for n, name in enumerate(results.experiment.names)}
    figure, panels = pictures.new_panels(
        len(tasks), _COLUMNS, panel=(4.2, 3.0), margin=(1.5, 0.5), sharex=True
    )
    for axes, task in zip(panels, tasks):
        axes.set_title(task.name, loc="left", fontsize=12)
        for model in results.experiment.variants:
            outcomes = report.select_outcomes(results, task.name, model)
            line = pictures.Line.over_seeds([*map(collect_points, outcomes)], interval_of_share)
            line.draw(axes, styles[model.name], label=model.name)
        pictures.style_values(axes, -0.03, 1.03, log=False)  # with room for lines at 0 and 1
    figure.supxlabel(label, color=GREY)
    figure.supylabel("share of right answers", color=GREY)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False)
    return figure
