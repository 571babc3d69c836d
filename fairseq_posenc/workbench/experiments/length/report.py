"""Reports perplexity by context length: a table, a record and a picture."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fairseq_posenc.files import write_whole
from fairseq_posenc.version import __version__
from fairseq_posenc.workbench.experiments.length.checkpoint import NamedCheckpoint
from fairseq_posenc.workbench.experiments.length.scoring import Score, Scores
from fairseq_posenc.workbench.results import markdown, pictures
from fairseq_posenc.workbench.results.differences import compare
from fairseq_posenc.workbench.results.intervals import LEVEL, interval_of_perplexity
from fairseq_posenc.workbench.results.pictures import GREY, PALE
from fairseq_posenc.workbench.results.record import Record, own_command

NON_OVERLAPPING, SLIDING = "non-overlapping", "sliding"
MODES = (NON_OVERLAPPING, SLIDING)
_MARGIN = 1.05  # room above and below the lines


class ModelScores(NamedTuple):
    """The scores of one model."""

    named: NamedCheckpoint  # the model
    encoding: str  # spec of its positions, or "fairseq's CLASS" for fairseq's own models
    trained_length: int  # tokens in a training sample
    updates: int | None  # training updates; None if they are not known
    scores: Scores  # by mode and context length


class LengthResults(NamedTuple):
    """The scores of all models on a text."""

    text: str  # name of the text: a file, or the split of a data-bin
    tokens: int  # number of its tokens
    stride: int  # number of tokens by which the sliding window moves
    rows: list[ModelScores]  # scores of each model
    windows: int | None = None  # number of windows that were scored; None for the whole text

    @property
    def modes(self) -> list[str]:
        """The modes of evaluation."""
        return list(self.rows[0].scores)

    @property
    def lengths(self) -> list[int]:
        """The context lengths."""
        return list(self.rows[0].scores[self.modes[0]])


def format_table(results: LengthResults) -> str:
    """Format a table of all models in Markdown, with the reasons for missing figures."""
    rows = [
        [
            markdown.escape(row.named.name),
            mode,
            f"{row.trained_length:,}",
            *map(_format_cell, scores.values()),
        ]
        for row in results.rows
        for mode, scores in row.scores.items()
    ]
    header = ["model", "evaluation", "trained at", *(f"{n:,}" for n in results.lengths)]
    notes = [
        f"- {markdown.escape(f'{row.named.name}: {note}')}"
        for row in results.rows
        for note in _explain_dashes(row)
    ]
    notes += _compare_with_first(results)
    return "\n".join([markdown.table(header, rows, "llr"), *([""] if notes else []), *notes])


def _compare_with_first(results: LengthResults) -> list[str]:
    """Compare each model with the first one at each length, by paired windows."""
    first, *others = results.rows
    notes = []
    for row in others if results.windows else ():
        changes = []
        for length, score in row.scores[SLIDING].items():
            ours, theirs = (
                dict(enumerate(s.windows)) for s in (score, first.scores[SLIDING][length])
            )
            low, high = (math.exp(bound) for bound in compare(ours, theirs).interval[1:])
            if ours and theirs and math.isfinite(high):
                changes.append(f"{length:,}: {low:.3f} to {high:.3f}")
        if changes:
            names = markdown.escape(row.named.name), markdown.escape(first.named.name)
            notes.append(
                f"- {names[0]}: its perplexity divided by that of {names[1]} ({LEVEL:.0%} interval "
                f"over the windows, paired): {'; '.join(changes)}"
            )
    return notes


def _format_cell(score: Score) -> str:
    if score.perplexity is None:
        return "-"
    if score.windows:
        return interval_of_perplexity(score.windows).show(2)
    return f"{score.perplexity:,.2f}"


def _explain_dashes(row: ModelScores) -> list[str]:
    """Give the reason for a model's first missing figure; empty if it has all figures."""
    refusals = (score.refusal for scores in row.scores.values() for score in scores.values())
    reason = next(filter(None, refusals), "")
    return [f"no figure, because {reason}"] if reason else []


def write_markdown(results: LengthResults, path: Path, picture: str) -> None:
    """Write the report; ``picture`` is the name of a file beside it, or empty."""
    parts = [
        "# Perplexity against context length",
        _introduce(results),
        format_table(results),
        f"![Perplexity against context length]({picture})" if picture else "",
    ]
    write_whole(path, "\n\n".join(part for part in parts if part) + "\n")


def _introduce(results: LengthResults) -> str:
    windows = {
        NON_OVERLAPPING: "*Non-overlapping*: the text is cut into blocks of the context length.",
        SLIDING: (
            f"*Sliding*: a window of the context length moves on by {results.stride:,} tokens, "
            "and only these tokens are predicted, so each has at least the rest of the window as "
            "context."
        ),
    }
    if results.windows:
        return (
            f"Perplexity per token on {markdown.code(results.text)}, with its {LEVEL:.0%} interval "
            f"over {results.windows} windows that are spread over the text. Of each window the "
            f"last {results.stride:,} tokens are predicted, the same at every length."
        )
    return " ".join(
        [
            f"Perplexity per token on {markdown.code(results.text)}. Each figure covers the same "
            f"{results.tokens:,} tokens, all of it, each predicted once. The first one is "
            "predicted from the symbol with which texts begin in training (of fairseq the end of a "
            "sentence); the input of a block begins with the token before its first predicted one.",
            *(windows[mode] for mode in results.modes),
        ]
    )


def build_record(results: LengthResults) -> Record:
    """Build the record of all scores."""
    rows = [
        {
            "model": row.named.name,
            "checkpoint": str(row.named.path),
            "override": row.named.spec_override,
            "position_encoding": row.encoding,
            "trained_length": row.trained_length,
            "updates": row.updates,
            "evaluation": mode,
            **{name: value for name, value in score._asdict().items() if name != "windows"},
            **{f"window_{n}": value for n, value in enumerate(score.windows, start=1)},
            "perplexity": score.perplexity,
        }
        for row in results.rows
        for mode, scores in row.scores.items()
        for score in scores.values()
    ]
    data = {
        "text": results.text,
        "tokens": results.tokens,
        "fairseq_posenc": __version__,
        "torch": str(torch.__version__),
    }
    return Record("lm-length", {"perplexity": rows}, data, command=own_command())


def draw(results: LengthResults, path: Path) -> bool:
    """Draw perplexity over length, a panel for each mode; return whether there is any figure."""
    modes = {mode: _collect_lines(results, mode) for mode in results.modes}
    values = [value for lines in modes.values() for line in lines.values() for value in line.values]
    if not values:
        return False

    def label(length: int, perplexity: float) -> str:
        # The line of a model that cannot read the longest texts ends early.
        at = "" if length == results.lengths[-1] else f" at {length:,}"
        return f"{perplexity:,.1f}{at}"

    figure, panels = pictures.new_panels(len(modes), len(modes), (6.2, 4.4))
    for axes, (mode, lines) in zip(panels, modes.items()):
        axes.set_title(mode, loc="left", fontsize=12)
        _style_lengths(axes, results)
        pictures.style_values(axes, min(values) / _MARGIN, max(values) * _MARGIN, log=True)
        pictures.draw_lines(axes, lines, label, marker="o", ms=3.5)
    panels[0].set_ylabel("perplexity per token", color=GREY)
    pictures.save(figure, path)
    return True


def _collect_lines(results: LengthResults, mode: str) -> dict[str, pictures.Line]:
    """Collect the perplexity of each model over the lengths that it can read."""
    return {
        row.named.name: pictures.Line.over_seeds(
            [[(s.length, s.perplexity) for s in row.scores[mode].values() if s.perplexity]]
        )
        for row in results.rows
    }


def _style_lengths(axes: Any, results: LengthResults) -> None:
    from matplotlib.ticker import NullLocator

    axes.set_xscale("log", base=2)
    axes.set_xticks(results.lengths, [f"{length:,}" for length in results.lengths])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("context length, tokens", color=GREY)
    for length in sorted({row.trained_length for row in results.rows}):
        axes.axvline(length, color=PALE, linestyle=":", linewidth=1.2, zorder=0)
        place = axes.get_xaxis_transform()
        axes.text(length, 1.0, " trained", color=GREY, fontsize=9, transform=place, va="top")
