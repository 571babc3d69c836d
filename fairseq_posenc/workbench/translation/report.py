"""The results of an evaluation: tables in Markdown, and all figures as a record."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

from fairseq_posenc.workbench.results.intervals import NOTE, Interval, interval
from fairseq_posenc.workbench.results.markdown import table
from fairseq_posenc.workbench.results.record import Record, own_command
from fairseq_posenc.workbench.running.files import write_whole
from fairseq_posenc.workbench.translation.generate import Search
from fairseq_posenc.workbench.translation.scores import METRICS, PIECE_BLEU, Difference, LengthGroup


class SystemScores(NamedTuple):
    """The scores of one system, in one of its trainings, with one search."""

    system: str  # name of the system
    path: str  # checkpoint or text file, as the user named it
    training: int  # number of the training
    search: Optional[Search]  # settings of beam search; None for a given file of translations
    hypotheses: str  # file of the plain translations
    scores: dict[str, float]  # scores by metric
    piece_bleu: Optional[float]  # BLEU-4 on pieces; None if it could not be measured


class Evaluation(NamedTuple):
    """All figures of an evaluation."""

    subset: str  # name of the test set
    reference: str  # file of its references
    sentences: int  # number of its sentences
    rows: list[SystemScores]  # the scores, in the user's order
    signatures: dict[str, str]  # sacreBLEU's, by metric
    piece_bleu: str  # how BLEU-4 on pieces was measured, or why not
    baseline: str  # the system that the others are compared with
    differences: dict[str, list[Difference]]  # of each system from the baseline
    # sacreBLEU's of the paired test, by metric; empty without another system
    test_signatures: dict[str, str]
    # BLEU by length of the source; None if the source text is not known
    groups: Optional[list[LengthGroup]]

    @property
    def has_trainings(self) -> bool:
        """Whether systems have several trainings, which differ by seed."""
        return any(row.training > 1 for row in self.rows)


def record(result: Evaluation) -> Record:
    """Build the record of all figures."""
    rows = [
        {
            "system": row.system,
            "path": row.path,
            "training": row.training,
            **_search_fields(row.search),
            "hypotheses": row.hypotheses,
            **row.scores,
            PIECE_BLEU: row.piece_bleu,
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
        f"signature of {PIECE_BLEU}": result.piece_bleu,
    }
    tables = {"scores": rows, "means": compute_means(result.rows)}
    tables |= {"differences": differences, "lengths": lengths}
    return Record("bleu", tables, data, command=own_command())


def compute_means(rows: Sequence[SystemScores]) -> list[dict[str, Any]]:
    """Compute the mean scores of each system and search over its trainings, with intervals."""
    groups: dict[tuple[str, Optional[Search]], list[SystemScores]] = {}
    for row in rows:
        groups.setdefault((row.system, row.search), []).append(row)
    found = []
    for (system, search), alike in groups.items():
        mean = {"system": system, **_search_fields(search), "trainings": len(alike)}
        for name in METRICS:
            mean |= interval(row.scores[name] for row in alike).figures(name)
        found.append(mean)
    return found


def _search_fields(search: Optional[Search]) -> dict[str, Any]:
    return search._asdict() if search else dict.fromkeys(Search._fields)


REPORT, FIGURES = "bleu.md", "bleu.json"
_OF_ONE = (
    "p: how likely chance alone, in the choice of the test sentences, makes so large a difference "
    "(paired bootstrap). What another seed of the training would change is not in it."
)
_OF_SEVERAL = (
    "Of all trainings' translations together. p: how likely so large a difference is if nothing "
    "but chance put a translation among those of one system and not of the other, in any training "
    "and sentence (approximate randomization, Clark et al. 2011)."
)


def write_report(result: Evaluation, out: Path) -> str:
    """Write the report and the figures into a folder; return the report's text."""
    introduction = (
        f"{result.sentences:,} sentences of `{result.subset}`, plain text against "
        f"`{result.reference}`. Higher is better."
    )
    parts = ["# Translation quality", introduction, *_format_scores(result)]
    parts += [*_format_means(result), *_format_differences(result), *_format_lengths(result)]
    text = "\n\n".join(parts) + "\n"
    record(result).write(out / FIGURES)
    write_whole(out / REPORT, text)
    return text


def _format_scores(result: Evaluation) -> list[str]:
    rows = [
        [
            f"`{row.system}`" + (f", training {row.training}" if result.has_trainings else ""),
            row.search.name if row.search else "-",
            f"{row.search.length_penalty:g}" if row.search else "-",
            *(f"{row.scores[metric]:.2f}" for metric in METRICS),
            "-" if row.piece_bleu is None else f"{row.piece_bleu:.4f}",
            f"`{row.path}`",
        ]
        for row in result.rows
    ]
    header = [
        "system",
        "search",
        "length penalty",
        *METRICS,
        PIECE_BLEU,
        "checkpoint or translations",
    ]
    signatures = {**result.signatures, PIECE_BLEU: result.piece_bleu}
    return [table(header, rows, "llrrrrl"), _format_list(signatures)]


def _format_means(result: Evaluation) -> list[str]:
    if not result.has_trainings:
        return []
    rows = []
    for each in compute_means(result.rows):
        search = Search(each["beam"], each["length_penalty"]).name if each["beam"] else "-"
        bounds = [[each[f"{metric}{end}"] for end in ("", "_low", "_high")] for metric in METRICS]
        scores = [Interval(*found).show(2) for found in bounds]
        rows.append([f"`{each['system']}`", search, str(each["trainings"]), *scores])
    header = ["system", "search", "trainings", *METRICS]
    return ["## Means over trainings", table(header, rows, "llr"), f"In brackets: {NOTE}."]


def _format_differences(result: Evaluation) -> list[str]:
    if not result.differences:
        return []
    rows = []
    for name, found in result.differences.items():
        rows.append([f"`{name}`"])
        for each in found:
            p_value = "same translations" if each.p_value is None else f"{each.p_value:.4f}"
            rows[-1] += [f"{each.difference:+.2f}", p_value]
    header = ["system", *(cell for metric in METRICS for cell in (metric, "p"))]
    return [
        f"## Differences from `{result.baseline}`",
        table(header, rows),
        _OF_SEVERAL if result.has_trainings else _OF_ONE,
        _format_list(result.test_signatures),
    ]


def _format_lengths(result: Evaluation) -> list[str]:
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


def _format_list(signatures: dict[str, str]) -> str:
    return "\n".join(f"- {name}: `{signature}`" for name, signature in signatures.items())
