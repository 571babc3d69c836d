"""Formats the record of an evaluation as tables in Markdown."""

from collections.abc import Sequence
from operator import itemgetter

from fairseq_posenc.workbench.results.intervals import INTERVAL_NOTE, Interval
from fairseq_posenc.workbench.results.markdown import code, table
from fairseq_posenc.workbench.results.record import Record, Row, group_by
from fairseq_posenc.workbench.translation.scores import METRICS

_P_OF_ONE_TRAINING = (
    "p is the probability of a difference at least this large by chance in the choice of the test "
    "sentences (paired bootstrap). It does not account for the variation between training seeds."
)
_P_OF_SEVERAL_TRAININGS = (
    "The scores are over the translations of all trainings. p is the probability of a difference "
    "at least this large if the translations of the two systems are exchanged at random, in every "
    "training and sentence (approximate randomization, Clark et al. 2011)."
)


def format_report(record: Record) -> str:
    """Format the report."""
    data, rows = record.data, record.rows
    search = f"beam {rows[0]['beam']}, length penalty {rows[0]['length_penalty']:g}"
    parts = [
        "# Translation quality",
        f"{data['sentences']:,} sentences of {code(data['subset'])}, plain text against "
        f"{code(data['reference'])}; {search}. Higher is better.",
        _format_scores(record),
    ]
    has_several_trainings = rows[-1]["training"] > 1  # all systems have equally many
    if has_several_trainings:
        parts.append(f"In brackets: {INTERVAL_NOTE}.")
    parts.append(_list_signatures(data, "signature of "))
    if differences := record.figures["differences"]:
        parts += [
            f"## Differences from {code(rows[0]['system'])}",
            _format_differences(differences),
            _P_OF_SEVERAL_TRAININGS if has_several_trainings else _P_OF_ONE_TRAINING,
            _list_signatures(data, "test signature of "),
        ]
    parts += ["## BLEU by length of the source", _format_lengths(record.figures["lengths"])]
    return "\n\n".join(parts) + "\n"


def _format_scores(record: Record) -> str:
    """Format the scores of each training and, of several, their means."""
    rows = [
        [code(x["system"]), str(x["training"]), *(f"{x[m]:.2f}" for m in METRICS), code(x["path"])]
        for x in record.rows
    ]
    for row in record.figures["means"]:
        if row["trainings"] > 1:
            means = [
                Interval(row[metric], row[f"{metric}_low"], row[f"{metric}_high"]).show(2)
                for metric in METRICS
            ]
            rows.append([code(row["system"]), f"mean of {row['trainings']}", *means, ""])
    return table(["system", "training", *METRICS, "checkpoint"], rows, "lrrrl")


def _format_differences(differences: Sequence[Row]) -> str:
    rows = []
    for name, group in group_by(differences, itemgetter("system")).items():
        cells = [code(name)]
        for row in group:
            p_value = "same translations" if row["p_value"] is None else f"{row['p_value']:.4f}"
            cells += [f"{row['difference']:+.2f}", p_value]
        rows.append(cells)
    return table(["system", *(cell for metric in METRICS for cell in (metric, "p"))], rows)


def _format_lengths(lengths: Sequence[Row]) -> str:
    rows = [
        [words, f"{group[0]['sentences']:,}", *(f"{row['BLEU']:.2f}" for row in group)]
        for words, group in group_by(lengths, itemgetter("words")).items()
    ]
    systems = dict.fromkeys(code(row["system"]) for row in lengths)
    return table(["words", "sentences", *systems], rows)


def _list_signatures(data: Row, prefix: str) -> str:
    """List the metrics' signatures, whose names in the record's data begin with a prefix."""
    return "\n".join(
        f"- {name.removeprefix(prefix)}: `{signature}`"
        for name, signature in data.items()
        if name.startswith(prefix)
    )
