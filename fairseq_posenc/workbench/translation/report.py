"""Writes the results of an evaluation: tables in Markdown, and all figures as a record."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fairseq_posenc.files import write_whole
from fairseq_posenc.workbench.results.intervals import INTERVAL_NOTE, Interval, interval
from fairseq_posenc.workbench.results.markdown import code, table
from fairseq_posenc.workbench.results.record import Record, Row
from fairseq_posenc.workbench.translation.scores import METRICS, PIECE_BLEU
from fairseq_posenc.workbench.translation.systems import Search

REPORT, FIGURES = "bleu.md", "bleu.json"
_P_OF_ONE_TRAINING = (
    "p is the probability of a difference at least this large by chance in the choice of the test "
    "sentences (paired bootstrap). It does not account for the variation between training seeds."
)
_P_OF_SEVERAL_TRAININGS = (
    "The scores are over the translations of all trainings. p is the probability of a difference "
    "at least this large if the translations of the two systems are exchanged at random, in every "
    "training and sentence (approximate randomization, Clark et al. 2011)."
)


def compute_means(rows: Sequence[Row]) -> list[Row]:
    """Compute the mean scores of each system and search over its trainings, with intervals."""
    means: list[Row] = []
    for group in _group(rows, "system", *Search._fields):
        mean: dict[str, Any] = {name: group[0][name] for name in ("system", *Search._fields)}
        mean["trainings"] = len(group)
        for name in METRICS:
            mean |= interval(row[name] for row in group).figures(name)
        means.append(mean)
    return means


def _group(rows: Sequence[Row], *columns: str) -> list[list[Row]]:
    """Group the rows that have the same values in some columns."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in columns), []).append(row)
    return list(groups.values())


def write_report(record: Record, out: Path) -> str:
    """Write the report and the record into a folder; return the report's text."""
    data = record.data
    introduction = (
        f"{data['sentences']:,} sentences of {code(data['subset'])}, plain text against "
        f"{code(data['reference'])}. Higher is better."
    )
    parts = ["# Translation quality", introduction, *_format_scores(record)]
    for format_section in (_format_means, _format_differences, _format_lengths):
        parts += format_section(record)
    text = "\n\n".join(parts) + "\n"
    record.write(out / FIGURES)
    write_whole(out / REPORT, text)
    return text


def _has_several_trainings(record: Record) -> bool:
    """Check whether systems have several trainings, which differ by seed."""
    return any(row["training"] > 1 for row in record.figures["scores"])


def _name_search(row: Row) -> str:
    return Search(row["beam"], row["length_penalty"]).name


def _format_scores(record: Record) -> list[str]:
    has_several_trainings = _has_several_trainings(record)
    rows = [
        [
            code(row["system"])
            + (f", training {row['training']}" if has_several_trainings else ""),
            _name_search(row),
            f"{row['length_penalty']:g}",
            *(f"{row[metric]:.2f}" for metric in METRICS),
            "-" if row[PIECE_BLEU] is None else f"{row[PIECE_BLEU]:.4f}",
            code(str(row["path"])),
        ]
        for row in record.figures["scores"]
    ]
    header = ["system", "search", "length penalty", *METRICS, PIECE_BLEU, "checkpoint"]
    return [table(header, rows, "llrrrrl"), _list_signatures(record, "signature of ")]


def _format_means(record: Record) -> list[str]:
    if not _has_several_trainings(record):
        return []
    rows = []
    for row in record.figures["means"]:
        cells = [code(row["system"]), _name_search(row), str(row["trainings"])]
        for metric in METRICS:
            mean = Interval(row[metric], row[f"{metric}_low"], row[f"{metric}_high"])
            cells.append(mean.show(2))
        rows.append(cells)
    header = ["system", "search", "trainings", *METRICS]
    return ["## Means over trainings", table(header, rows, "llr"), f"In brackets: {INTERVAL_NOTE}."]


def _format_differences(record: Record) -> list[str]:
    rows = []
    for differences in _group(record.figures["differences"], "system"):
        cells = [code(differences[0]["system"])]
        for row in differences:
            p_value = "same translations" if row["p_value"] is None else f"{row['p_value']:.4f}"
            cells += [f"{row['difference']:+.2f}", p_value]
        rows.append(cells)
    if not rows:
        return []
    return [
        f"## Differences from {code(record.data['baseline'])}",
        table(["system", *(cell for metric in METRICS for cell in (metric, "p"))], rows),
        _P_OF_SEVERAL_TRAININGS if _has_several_trainings(record) else _P_OF_ONE_TRAINING,
        _list_signatures(record, "test signature of "),
    ]


def _format_lengths(record: Record) -> list[str]:
    groups = _group(record.figures["lengths"], "words")
    header = ["words", "sentences", *(code(row["system"]) for row in groups[0])]
    rows = []
    for group in groups:
        scores = [f"{row['BLEU']:.2f}" for row in group]
        rows.append([group[0]["words"], f"{group[0]['sentences']:,}", *scores])
    return ["## BLEU by length of the source", table(header, rows)]


def _list_signatures(record: Record, prefix: str) -> str:
    """List the metrics' signatures, whose names in the record's data begin with a prefix."""
    return "\n".join(
        f"- {name.removeprefix(prefix)}: `{signature}`"
        for name, signature in record.data.items()
        if name.startswith(prefix)
    )
