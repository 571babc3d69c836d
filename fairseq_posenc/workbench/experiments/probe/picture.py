"""The picture: right answers over length, a panel a task, a line an encoding."""

from __future__ import annotations

from pathlib import Path

from fairseq_posenc.workbench.experiments.probe.results import TaskResults, share, share_by_seed
from fairseq_posenc.workbench.results import pictures
from fairseq_posenc.workbench.results.intervals import LEAST_SEEDS
from fairseq_posenc.workbench.results.pictures import GREY, PALE

_COLUMNS = 3


def draw(results: TaskResults, path: Path) -> None:
    """Draw all tasks, with the seeds' intervals as bands, into a PNG file."""
    tasks, lengths = results.settings.tasks, sorted(results.settings.lengths)
    columns = min(_COLUMNS, len(tasks))
    rows = -(-len(tasks) // columns)
    figure = pictures.new_figure(4.2 * columns + 1.5, 3.0 * rows + 0.5, dpi=110)
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True).flat
    for axes, task in zip(panels, tasks):
        axes.set_title(task.name, loc="left", fontsize=12)
        styles = pictures.looks(results.settings.names)
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
