"""The pictures: right answers over length, over updates, and over depth and length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fairseq_posenc.workbench.experiments.probe.data import DEPTHS
from fairseq_posenc.workbench.experiments.probe.report import (
    TaskResults,
    learning_curve,
    share_at_depth,
    share_by_seed,
)
from fairseq_posenc.workbench.experiments.variants import Variant
from fairseq_posenc.workbench.results import pictures
from fairseq_posenc.workbench.results.intervals import (
    LEAST_SEEDS,
    average_lines,
    interval_of_share,
)
from fairseq_posenc.workbench.results.pictures import GREY, PALE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Line = Sequence[Sequence[tuple[int, float]]]  # points of a model's line, for each seed

_COLUMNS = 3


def draw_depths(results: TaskResults, task: str, path: Path) -> None:
    """Draw a task that has depths into a PNG file: a map of depth and length for each model."""
    models, lengths = results.settings.variants, sorted(results.settings.lengths)
    columns = min(_COLUMNS, len(models))
    rows = -(-len(models) // columns)
    figure = pictures.new_figure(3.6 * columns + 1.0, 2.2 * rows + 0.6, dpi=110)
    panels = [*figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flat]
    for axes in panels:
        axes.set_visible(False)
    for axes, model in zip(panels, models):
        shares = [
            [share_at_depth(results, task, model, length, depth).mean for length in lengths]
            for depth in DEPTHS
        ]
        axes.set_visible(True)
        image = axes.imshow(shares, vmin=0, vmax=1, cmap="viridis", aspect="auto")
        axes.set_title(model.name, loc="left", fontsize=11)
        axes.set_xticks(range(len(lengths)), [str(length) for length in lengths], fontsize=8)
        axes.set_yticks(range(len(DEPTHS)), [f"{depth:.0%}" for depth in DEPTHS], fontsize=8)
        axes.axvline(len(results.settings.within) - 0.5, color="white", linestyle=":")
    figure.colorbar(image, ax=figure.axes, label="share of right answers", shrink=0.8)
    figure.supxlabel("length in words (dotted: longest in training)", color=GREY)
    figure.supylabel("depth of the needle", color=GREY)
    pictures.save(figure, path)


def draw(results: TaskResults, path: Path) -> None:
    """Draw right answers over the length of the question, a panel for each task, as PNG."""
    lengths = sorted(results.settings.lengths)

    def line(task: str, model: Variant) -> Line:
        by_length = [share_by_seed(results, task, model, [length]) for length in lengths]
        seeds = by_length[0]
        return [[(n, pair[seed]) for n, pair in zip(lengths, by_length)] for seed in seeds]

    label = "length of the question, in words (dotted: longest in training)"
    figure = _draw_tasks(results, line, label)
    for axes in figure.axes:
        axes.axvline(results.settings.trained, color=PALE, linestyle=":", linewidth=1.2, zorder=0)
    pictures.save(figure, path)


def draw_learning(results: TaskResults, path: Path) -> None:
    """Draw right answers over the updates of training, a panel for each task, as PNG."""

    def line(task: str, model: Variant) -> Line:
        return [
            learning_curve(outcome)
            for outcome in results.outcomes
            if (outcome.run.case, outcome.run.variant) == (task, model)
        ]

    pictures.save(_draw_tasks(results, line, "updates; questions as in training"), path)


def _draw_tasks(
    results: TaskResults, line_of: Callable[[str, Variant], Line], label: str
) -> Figure:
    """Draw a panel for each task and a line for each model, with its seeds as dots."""
    tasks = results.settings.tasks
    columns = min(_COLUMNS, len(tasks))
    rows = -(-len(tasks) // columns)
    figure = pictures.new_figure(4.2 * columns + 1.5, 3.0 * rows + 0.5, dpi=110)
    panels = [*figure.subplots(rows, columns, squeeze=False, sharex=True).flat]
    styles = pictures.assign_styles(results.settings.names)
    for axes, task in zip(panels, tasks):
        axes.set_title(task.name, loc="left", fontsize=12)
        for model in results.settings.variants:
            seeds, style = line_of(task.name, model), styles[model.name]
            means = average_lines(seeds, interval_of_share)
            x, intervals = [at for at, _ in means], [interval for _, interval in means]
            axes.plot(
                x, [interval.mean for interval in intervals], lw=1.8, label=model.name, **style
            )
            for points in seeds:
                dots = [at for at, _ in points], [share for _, share in points]
                axes.plot(*dots, "o", color=style["color"], ms=2)
            if len(seeds) >= LEAST_SEEDS:
                bounds = (
                    [interval.low for interval in intervals],
                    [interval.high for interval in intervals],
                )
                axes.fill_between(x, *bounds, color=style["color"], alpha=0.12, linewidth=0)
        pictures.style_values(axes, -0.03, 1.03, log=False)
    for axes in panels[len(tasks) :]:
        axes.remove()
    figure.supxlabel(label, color=GREY)
    figure.supylabel("share of right answers", color=GREY)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False)
    return figure
