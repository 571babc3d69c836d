"""Reports perplexity by context length: a record and, from its rows, a table and a picture."""

from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path

import torch

from fairseq_posenc.version import __version__
from fairseq_posenc.workbench.experiments.length.scoring import Score
from fairseq_posenc.workbench.results import intervals, pictures
from fairseq_posenc.workbench.results.intervals import LEVEL, interval
from fairseq_posenc.workbench.results.markdown import align_columns, format_number
from fairseq_posenc.workbench.results.record import Record, Row, group_by, own_command


def score_figures(score: Score) -> Row:
    """Collect the figures of a score by column; windows have the columns ``window_1`` and so on."""
    figures = {**score._asdict(), "perplexity": score.perplexity}
    windows = enumerate(figures.pop("windows"), start=1)
    return {**figures, **{f"window_{number}": value for number, value in windows}}


def build_record(rows: Sequence[Row], text: Path, tokens: int) -> Record:
    """Build the record; a row has facts about a model, and the figures of a score."""
    versions = {"fairseq_posenc": __version__, "torch": str(torch.__version__)}
    data = {"text": str(text), "tokens": tokens, **versions}
    return Record("lm-length", {"perplexity": rows}, data, command=own_command())


def _read_windows(row: Row) -> dict[int, float]:
    """Read perplexities by window (``window_1``, ...); none for whole texts and refused models.

    ``intervals.compare`` pairs two models by window, as elsewhere by seed, and takes logarithms.
    """
    return dict(enumerate(x for column, x in row.items() if column.startswith("window_")))


def format_results(record: Record) -> str:
    """Format a table of all models, with notes on missing figures and differences."""
    groups = group_by(record.figures["perplexity"], itemgetter("model"))  # by length
    lengths = [f"{row['length']:,}" for row in next(iter(groups.values()))]
    lines = [["model", "trained at", *lengths]]
    notes = []
    for model, scores in groups.items():
        lines.append([model, f"{scores[0]['trained_length']:,}", *map(_format_cell, scores)])
        if reasons := [row["refusal"] for row in scores if row["refusal"]]:
            notes.append(f"- {model}: no figure, because {reasons[0]}")
    notes += _compare_with_first(groups)
    return "\n".join([align_columns(lines, left=1), *([""] if notes else []), *notes])


def _compare_with_first(groups: Mapping[str, Sequence[Row]]) -> list[str]:
    """Divide the perplexities of each model by the first one's, if windows were scored."""
    first, *others = groups  # names of models, in the user's order
    notes = []
    for model in others:
        ratios = []
        for row, first_row in zip(groups[model], groups[first], strict=True):  # by length
            ratio = intervals.compare(_read_windows(row), _read_windows(first_row)).log_ratio.exp()
            if ratio.is_bounded:  # there were enough windows
                low, high = format_number(ratio.low, 3), format_number(ratio.high, 3)
                ratios.append(f"{row['length']:,}: {low} to {high}")
        if ratios:
            notes.append(
                f"- {model}: its perplexity divided by that of {first} ({LEVEL:.0%} interval over "
                f"the windows, paired): {'; '.join(ratios)}"
            )
    return notes


def _format_cell(row: Row) -> str:
    if windows := _read_windows(row):
        return intervals.interval_of_perplexity(windows.values()).show(2)  # of their mean loss
    return format_number(row["perplexity"], 2)


def draw(record: Record, path: Path) -> bool:
    """Draw perplexity over length; return whether there was any to draw."""
    path.unlink(missing_ok=True)  # of an earlier call
    rows = record.figures["perplexity"]
    if not any(row["perplexity"] for row in rows):
        return False
    lines = {  # a single value has no interval, so lines are drawn without bands
        model: [(row["length"], interval([row["perplexity"]])) for row in same if row["perplexity"]]
        for model, same in group_by(rows, itemgetter("model")).items()
    }
    lengths = sorted({row["length"] for row in rows})

    def label_last_point(length: int, perplexity: float) -> str:
        """Label a line's last point; say at which length, if the model cannot read longer texts."""
        at = "" if length == lengths[-1] else f" at {length:,}"
        return f"{format_number(perplexity, 1)}{at}"

    figure, (axes,) = pictures.new_panels(1, columns=1, size=(6.2, 4.4))
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.minorticks_off()
    axes.set(xlabel="context length, tokens", ylabel="perplexity per token")
    for length in sorted({row["trained_length"] for row in rows}):
        axes.axvline(length, color="gray", linestyle=":", zorder=0)
        axes.text(length, 1.0, " trained", transform=axes.get_xaxis_transform(), va="top")
    pictures.draw_means(axes, lines, label_last_point, log=True, marker="o", ms=3.5)
    pictures.save(figure, path)
    return True
