"""The pictures: right answers over length, and over depth and length."""

from __future__ import annotations

from pathlib import Path

from fairseq_posenc.workbench.experiments.probe.data import DEPTHS
from fairseq_posenc.workbench.experiments.probe.results import (
    TaskResults,
    share,
    share_at_depth,
    share_by_seed,
)
from fairseq_posenc.workbench.results import pictures
from fairseq_posenc.workbench.results.intervals import LEAST_SEEDS
from fairseq_posenc.workbench.results.pictures import GREY, PALE

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
    """Draw all tasks, with the seeds' intervals as bands, into a PNG file."""
    tasks, lengths = results.settings.tasks, sorted(results.settings.lengths)
    columns = min(_COLUMNS, len(tasks))
    rows = -(-len(tasks) // columns)
    figure = pictures.new_figure(4.2 * columns + 1.5, 3.0 * rows + 0.5, dpi=110)
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True).flat
    for axes, task in zip(panels, tasks):
        axes.set_title(task.name, loc="left", fontsize=12)
        styles = pictures.assign_styles(results.settings.names)
        for model in results.settings.variants:
            shares = [share(results, task.name, model, [length]) for length in lengths]
            style = styles[model.name]
            axes.plot(lengths, [each.mean for each in shares], lw=1.8, label=model.name, **style)
            for length in lengths:
                seeds = share_by_seed(results, task.name, model, [length]).values()
                axes.plot([length] * len(seeds), list(seeds), "o", color=style["color"], ms=2)
            if len(results.settings.seeds) >= LEAST_SEEDS:
                bounds = [each.low for each in shares], [each.high for each in shares]
                axes.fill_between(lengths, *bounds, color=style["color"], alpha=0.12, linewidth=0)
        axes.axvline(results.settings.trained, color=PALE, linestyle=":", linewidth=1.2, zorder=0)
        pictures.style_values(axes, -0.03, 1.03, log=False)
    for axes in list(panels)[len(tasks) :]:
        axes.set_visible(False)
    figure.supxlabel("length of the question, in words (dotted: longest in training)", color=GREY)
    figure.supylabel("share of right answers", color=GREY)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False)
    pictures.save(figure, path)
