"""Computes BLEU and chrF with sacreBLEU, for a test set and by length, and compares systems.

:func:`format_report` shows the record of an evaluation as tables in Markdown.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import chain, pairwise
from operator import itemgetter, ne
from typing import Any

from sacrebleu.metrics import BLEU, CHRF
from sacrebleu.significance import PairedTest

from fairseq_posenc.errors import counted
from fairseq_posenc.workbench.results.intervals import INTERVAL_NOTE, Interval, interval
from fairseq_posenc.workbench.results.markdown import code, table
from fairseq_posenc.workbench.results.record import Record, Row, group_by

METRICS = {"BLEU": BLEU, "chrF2": CHRF}  # sacreBLEU's name -> metric
# Most words of a source sentence in each group; longer ones are the last group.
_MAX_WORDS = (5, 10, 15, 20, 30, 50)
_P_OF_ONE_CHECKPOINT = (
    "p is the probability of a difference at least this large by chance in the choice of the test "
    "sentences (paired bootstrap), raised to 2 / 2^n if less, where n translations differ. It does "
    "not account for the variation between training seeds."
)
_P_OF_SEVERAL_CHECKPOINTS = (
    "The scores are over the translations of all training runs. p is the probability of a "
    "difference at least this large if the translations of the two systems are exchanged at "
    "random, in every run and sentence (approximate randomization, Clark et al. 2011)."
)
# system -> the translations by each of its checkpoints, line by line
Systems = Mapping[str, Sequence[Sequence[str]]]


def build_metrics(references: Sequence[str]) -> dict[str, BLEU | CHRF]:
    """Build sacreBLEU's metrics, by name, for a test set in plain text."""
    return {name: metric(references=[references]) for name, metric in METRICS.items()}


def compute_means(rows: Sequence[Row]) -> list[Row]:
    """Compute the mean scores of each system over its training runs, with intervals."""
    means: list[Row] = []
    for system, group in group_by(rows, itemgetter("system")).items():
        mean: dict[str, object] = {"system": system, "trainings": len(group)}
        for name in METRICS:
            mean |= interval(row[name] for row in group).figures(name)  # NAME, NAME_low, NAME_high
        means.append(mean)
    return means


def compare(references: Sequence[str], systems: Systems) -> tuple[list[Row], dict[str, str]]:
    """Compare each system with the first, by sacreBLEU's tests.

    Systems with one checkpoint each are compared by paired bootstrap. Those with several, equally
    many, are compared by approximate randomization over training runs and sentences (Clark et al.
    2011): the translations of a sentence by the n-th checkpoints of two systems are exchanged at
    random, and the score is computed from the translations by all checkpoints.

    Returns:
        Rows with the system, the metric, the difference of its score, and the p-value (None if
        both score the same, which sacreBLEU may call significant); and the signatures by metric.
        Both are empty for a single system.
    """
    joined = {name: list(chain(*by_checkpoint)) for name, by_checkpoint in systems.items()}
    baseline, *others = systems
    if not others:
        return [], {}
    num_checkpoints = len(systems[baseline])
    metrics = build_metrics([*references] * num_checkpoints)
    test_type = "ar" if num_checkpoints > 1 else "bs"  # approximate randomization, paired bootstrap
    # None in place of the references, which the metrics hold.
    results: Any  # metric -> results of the systems; typed too narrowly by sacreBLEU
    signatures, results = PairedTest(list(joined.items()), metrics, None, test_type)()
    differences: list[Row] = []
    for index, name in enumerate(others, start=1):
        # Exchanging none or all of n differing lines keeps the difference: p is at least 2 / 2^n.
        # sacreBLEU counts only larger differences. Its bootstrap's p is raised by the same rule.
        least = min(1.0, 2.0 ** (1 - sum(map(ne, joined[name], joined[baseline]))))
        for metric in METRICS:
            first, other = results[metric][0], results[metric][index]  # 0 is the baseline
            row = {"system": name, "metric": metric, "difference": other.score - first.score}
            p_value = max(least, other.p_value) if row["difference"] else None
            differences.append({**row, "p_value": p_value, "least_p_value": least})
    return differences, {name: str(signature) for name, signature in signatures.items()}


def score_by_length(
    references: Sequence[str], sources: Sequence[str], systems: Systems
) -> list[Row]:
    """Compute the BLEU of each system, over all its checkpoints, by the length of the source.

    A row has the range of words, such as ``6-10``, the number of sentences, system and BLEU.
    """
    rows: list[Row] = []
    lengths = [max(len(source.split()), 1) for source in sources]
    for low, high in pairwise((0, *_MAX_WORDS, math.inf)):
        numbers = [number for number, length in enumerate(lengths) if low < length <= high]
        if not numbers:
            continue
        words = f"over {low}" if high == math.inf else f"{low + 1}-{high}"
        for name, by_checkpoint in systems.items():
            expected = [references[number] for number in numbers] * len(by_checkpoint)
            hypotheses = [lines[number] for lines in by_checkpoint for number in numbers]
            bleu = float(BLEU().corpus_score(hypotheses, [expected]).score)
            rows.append({"words": words, "sentences": len(numbers), "system": name, "BLEU": bleu})
    return rows


def format_report(record: Record) -> str:
    """Format a record with the tables ``scores``, ``means``, ``differences`` and ``lengths``."""
    data, rows = record.data, record.figures["scores"]
    search = f"beam {rows[0]['beam']}, length penalty {rows[0]['length_penalty']:g}"
    parts = [
        "# Translation quality",
        f"{counted(data['sentences'], 'sentences')} of {code(data['subset'])}, plain text against "
        f"{code(data['reference'])}; {search}. Higher is better.",
        _format_scores(record),
    ]
    has_several = rows[-1]["training"] > 1  # all systems have equally many
    if has_several:
        parts.append(f"In brackets: {INTERVAL_NOTE}.")
    parts.append(_list_signatures(data, "signature of "))
    if differences := record.figures["differences"]:
        parts += [
            f"## Differences from {code(rows[0]['system'])}",
            _format_differences(differences),
            _P_OF_SEVERAL_CHECKPOINTS if has_several else _P_OF_ONE_CHECKPOINT,
            _list_signatures(data, "test signature of "),
        ]
    parts += ["## BLEU by length of the source", _format_lengths(record.figures["lengths"])]
    return "\n\n".join(parts) + "\n"


def _format_scores(record: Record) -> str:
    """Format the scores of each checkpoint and, of systems with several, their means."""
    rows = [
        [code(x["system"]), str(x["training"]), *(f"{x[m]:.2f}" for m in METRICS), code(x["path"])]
        for x in record.figures["scores"]
    ]
    for row in record.figures["means"]:
        if row["trainings"] > 1:
            means = [Interval(row[x], row[f"{x}_low"], row[f"{x}_high"]).show(2) for x in METRICS]
            rows.append([code(row["system"]), f"mean of {row['trainings']}", *means, ""])
    return table(["system", "run", *METRICS, "checkpoint"], rows, align="lrrrl")


def _format_differences(differences: Sequence[Row]) -> str:
    rows = []
    for name, group in group_by(differences, itemgetter("system")).items():
        cells = [code(name)]
        for row in group:
            p_value = "same score" if row["p_value"] is None else f"{row['p_value']:.4f}"
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


def _list_signatures(data: Mapping[str, object], prefix: str) -> str:
    """List the metrics' signatures, whose names in the record's data begin with a prefix."""
    return "\n".join(
        f"- {name.removeprefix(prefix)}: `{signature}`"
        for name, signature in data.items()
        if name.startswith(prefix)
    )
