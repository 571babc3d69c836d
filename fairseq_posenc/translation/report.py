"""The report of an evaluation: tables in Markdown, and all figures as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Optional

from fairseq_posenc.reporting.markdown import table
from fairseq_posenc.reporting.record import Record, own_command
from fairseq_posenc.running.files import write_whole
from fairseq_posenc.translation.generate import Search
from fairseq_posenc.translation.piece_bleu import NAME
from fairseq_posenc.translation.scores import METRICS, Difference, LengthGroup

REPORT, FIGURES = "bleu.md", "bleu.json"


class Row(NamedTuple):
    """The scores of one system with one search.

    Attributes:
        system: its name.
        path: its checkpoint or text file, as the user named it.
        search: how it searched; None for translations that were written already.
        hypotheses: the file with the plain translations.
        scores: by metric.
        piece_bleu: BLEU-4 on pieces; None if it could not be measured.
    """

    system: str
    path: str
    search: Optional[Search]
    hypotheses: str
    scores: dict[str, float]
    piece_bleu: Optional[float]


class Evaluation(NamedTuple):
    """What came out.

    Attributes:
        subset: name of the test set.
        reference: file with its references.
        sentences: its size.
        rows: the scores, in the user's order.
        signatures: sacreBLEU's, by metric.
        piece_bleu: how BLEU-4 on pieces was measured, or why not.
        baseline: the system that the others are compared with.
        differences: of each system from the baseline.
        test_signatures: sacreBLEU's of the paired test, by metric; empty without another system.
        groups: BLEU by length of the source; None if the source text is not known.
    """

    subset: str
    reference: str
    sentences: int
    rows: list[Row]
    signatures: dict[str, str]
    piece_bleu: str
    baseline: str
    differences: dict[str, list[Difference]]
    test_signatures: dict[str, str]
    groups: Optional[list[LengthGroup]]


def write_report(result: Evaluation, out: Path) -> str:
    """Write the report and the figures into a folder; return the report's text."""
    parts = ["# Translation quality", _introduction(result), *_scores(result)]
    if result.differences:
        parts += _differences(result)
    parts += _lengths(result)
    text = "\n\n".join(parts) + "\n"
    record(result).write(out / FIGURES)
    write_whole(out / REPORT, text)
    return text


def _introduction(result: Evaluation) -> str:
    return (
        f"{result.sentences:,} sentences of `{result.subset}`, plain text against "
        f"`{result.reference}`. Higher is better."
    )


def _scores(result: Evaluation) -> list[str]:
    rows = [
        [
            f"`{row.system}`",
            row.search.name if row.search else "-",
            f"{row.search.length_penalty:g}" if row.search else "-",
            *(f"{row.scores[metric]:.2f}" for metric in METRICS),
            "-" if row.piece_bleu is None else f"{row.piece_bleu:.4f}",
            f"`{row.path}`",
        ]
        for row in result.rows
    ]
    header = ["system", "search", "length penalty", *METRICS, NAME, "checkpoint or translations"]
    signatures = {**result.signatures, NAME: result.piece_bleu}
    return [table(header, rows, "llrrrrl"), _list(signatures)]


def _differences(result: Evaluation) -> list[str]:
    rows = [
        [f"`{name}`", *(cell for each in found for cell in _cells(each))]
        for name, found in result.differences.items()
    ]
    header = ["system", *(cell for metric in METRICS for cell in (metric, "p"))]
    return [
        f"## Differences from `{result.baseline}`",
        table(header, rows),
        "p: how likely chance alone, in the choice of the test sentences, makes so large a "
        "difference (paired bootstrap). What another seed of the training would change is not in "
        "it.",
        _list(result.test_signatures),
    ]


def _cells(found: Difference) -> tuple[str, str]:
    p_value = "same translations" if found.p_value is None else f"{found.p_value:.4f}"
    return f"{found.difference:+.2f}", p_value


def _lengths(result: Evaluation) -> list[str]:
    title = "## BLEU by length of the source"
    if result.groups is None:
        return [title, "Not measured: the source text is not known; name it with --source."]
    systems = list(result.groups[0].bleu)
    rows = [
        [group.words, f"{group.sentences:,}", *(f"{group.bleu[name]:.2f}" for name in systems)]
        for group in result.groups
    ]
    header = ["words", "sentences", *(f"`{name}`" for name in systems)]
    return [title, table(header, rows)]


def _list(signatures: dict[str, str]) -> str:
    return "\n".join(f"- {name}: `{signature}`" for name, signature in signatures.items())


def record(result: Evaluation) -> Record:
    """Return all figures."""
    rows = [
        {
            "system": row.system,
            "path": row.path,
            "beam": row.search.beam if row.search else None,
            "length_penalty": row.search.length_penalty if row.search else None,
            "hypotheses": row.hypotheses,
            **row.scores,
            NAME: row.piece_bleu,
        }
        for row in result.rows
    ]
    differences = [
        {"system": name, **each._asdict()}
        for name, found in result.differences.items()
        for each in found
    ]
    lengths = [
        {"words": group.words, "sentences": group.sentences, "system": name, "BLEU": bleu}
        for group in result.groups or ()
        for name, bleu in group.bleu.items()
    ]
    data = {
        "subset": result.subset,
        "reference": result.reference,
        "sentences": result.sentences,
        "baseline": result.baseline,
        **{f"signature of {name}": each for name, each in result.signatures.items()},
        **{f"test signature of {name}": each for name, each in result.test_signatures.items()},
        f"signature of {NAME}": result.piece_bleu,
    }
    tables = {"scores": rows, "differences": differences, "lengths": lengths}
    return Record("bleu", tables, data, command=own_command())
