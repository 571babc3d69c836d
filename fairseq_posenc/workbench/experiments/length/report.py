"""Reports perplexity by context length: a record and, from its rows, a table and a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from fairseq_posenc.version import __version__
from fairseq_posenc.workbench.experiments.length.scoring import Score
from fairseq_posenc.workbench.results import pictures
from fairseq_posenc.workbench.results.differences import compare
from fairseq_posenc.workbench.results.intervals import (
    LEVEL,
    average_lines,
    interval,
    interval_of_perplexity,
)
from fairseq_posenc.workbench.results.record import Record, Row, own_command
from fairseq_posenc.workbench.results.terminal import align

NON_OVERLAPPING, SLIDING = "non-overlapping", "sliding"
MODES = (NON_OVERLAPPING, SLIDING)


def score_figures(mode: str, score: Score, has_windows: bool) -> Row:
    """Collect the figures of a score by column, with one for each window if some are scored."""
    figures = {"evaluation": mode, **vars(score), "perplexity": score.perplexity}
    windows = figures.pop("windows")
    if has_windows:
        figures |= {f"window_{number}": value for number, value in enumerate(windows, start=1)}
    return figures


def build_record(rows: Sequence[Row], text: str, tokens: int) -> Record:
    """Build the record of all scores, a row for each model, mode and context length."""
    versions = {"fairseq_posenc": __version__, "torch": str(torch.__version__)}
    data = {"text": text, "tokens": tokens, **versions}
    return Record("lm-length", {"perplexity": rows}, data, command=own_command())


def _group_rows(record: Record) -> dict[tuple[str, str], list[Row]]:
    """Group the rows by model and mode of evaluation, in the order of context lengths."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in record.rows:
        groups.setdefault((row["model"], row["evaluation"]), []).append(row)
    return groups


def _read_windows(row: Row) -> dict[int, float]:
    """Read the perplexity by window from the columns ``window_1``, ...; empty for whole texts.

    In comparisons windows take the place of seeds, because all models read the same windows.
    """
    values = [value for column, value in row.items() if column.startswith("window_")]
    return dict(enumerate(values))


def format_results(record: Record) -> str:
    """Format a table of all models, with notes on missing figures and differences."""
    groups = _group_rows(record)
    lengths = [f"{row['length']:,}" for row in next(iter(groups.values()))]
    lines = [["model", "evaluation", "trained at", *lengths]]
    for (model, mode), scores in groups.items():
        trained = f"{scores[0]['trained_length']:,}"
        lines.append([model, mode, trained, *map(_format_cell, scores)])
    reasons: dict[str, str] = {}
    for row in record.rows:
        if row["refusal"]:
            reasons.setdefault(row["model"], row["refusal"])
    notes = [f"- {model}: no figure, because {reason}" for model, reason in reasons.items()]
    notes += _compare_with_first(groups)
    return "\n".join([align(lines, left=2), *([""] if notes else []), *notes])


def _compare_with_first(groups: Mapping[tuple[str, str], Sequence[Row]]) -> list[str]:
    """Compare each model with the first one at each length, if windows were scored."""
    # Windows are of one mode, so each model has one group. Rows are in the user's order of models.
    ((first, _), first_rows), *others = groups.items()
    notes = []
    for (model, _), rows in others:
        ratios = []
        for row, first_row in zip(rows, first_rows, strict=True):  # one for each length
            log_ratio = compare(_read_windows(row), _read_windows(first_row)).interval
            if log_ratio.is_bounded:
                low, high = math.exp(log_ratio.low), math.exp(log_ratio.high)
                ratios.append(f"{row['length']:,}: {low:.3f} to {high:.3f}")
        if ratios:
            notes.append(
                f"- {model}: its perplexity divided by that of {first} ({LEVEL:.0%} interval over "
                f"the windows, paired): {'; '.join(ratios)}"
            )
    return notes


def _format_cell(row: Row) -> str:
    if row["perplexity"] is None:
        return "-"
    if windows := _read_windows(row):
        return interval_of_perplexity(windows.values()).show(2)
    return f"{row['perplexity']:,.2f}"


def draw(record: Record, path: Path) -> bool:
    """Draw perplexity over length, a panel for each mode; return False if there is no figure."""
    modes: dict[str, dict[str, pictures.Means]] = {}
    for (model, mode), rows in _group_rows(record).items():
        points = [(row["length"], row["perplexity"]) for row in rows if row["perplexity"]]
        modes.setdefault(mode, {})[model] = average_lines([points], interval)
    if not any(row["perplexity"] for row in record.rows):
        return False
    lengths = sorted({row["length"] for row in record.rows})

    def label(length: int, perplexity: float) -> str:
        # A line that ends early, of a model that cannot read the longest texts, says where.
        at = "" if length == lengths[-1] else f" at {length:,}"
        return f"{perplexity:,.1f}{at}"

    figure, panels = pictures.new_panels(len(modes), columns=len(modes), panel=(6.2, 4.4))
    for axes, (mode, lines) in zip(panels, modes.items()):
        axes.set_title(mode, loc="left", fontsize=12)
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
        axes.minorticks_off()
        axes.set_xlabel("context length, tokens")
        for length in sorted({row["trained_length"] for row in record.rows}):
            axes.axvline(length, color="grey", linestyle=":", zorder=0)
            axes.text(length, 1.0, " trained", transform=axes.get_xaxis_transform(), va="top")
        pictures.use_log_scale(axes)
        pictures.draw_means(axes, lines, label, marker="o", ms=3.5)
    panels[0].set_ylabel("perplexity per token")
    pictures.save(figure, path)
    return True
