"""What came out of an evaluation, and its record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

from fairseq_posenc.workbench.results.intervals import interval
from fairseq_posenc.workbench.results.record import Record, own_command
from fairseq_posenc.workbench.translation.generate import Search
from fairseq_posenc.workbench.translation.piece_bleu import NAME
from fairseq_posenc.workbench.translation.scores import METRICS, Difference, LengthGroup


class Row(NamedTuple):
    """The scores of one system, in one of its trainings, with one search."""

    system: str  # its name
    path: str  # its checkpoint or text file, as the user named it
    training: int  # its number
    search: Optional[Search]  # how it searched; None for translations that were written already
    hypotheses: str  # the file with the plain translations
    scores: dict[str, float]  # by metric
    piece_bleu: Optional[float]  # BLEU-4 on pieces; None if it could not be measured


class Evaluation(NamedTuple):
    """What came out."""

    subset: str  # name of the test set
    reference: str  # file with its references
    sentences: int  # its size
    rows: list[Row]  # the scores, in the user's order
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
        """Whether systems have several, which differ by seed."""
        return any(row.training > 1 for row in self.rows)


def record(result: Evaluation) -> Record:
    """Return all figures."""
    rows = [
        {
            "system": row.system,
            "path": row.path,
            "training": row.training,
            **_searched(row.search),
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
    tables = {"scores": rows, "means": means(result.rows)}
    tables |= {"differences": differences, "lengths": lengths}
    return Record("bleu", tables, data, command=own_command())


def means(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the mean scores of each system and search over its trainings, with intervals."""
    groups: dict[tuple[str, Optional[Search]], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.system, row.search), []).append(row)
    found = []
    for (system, search), alike in groups.items():
        mean = {"system": system, **_searched(search), "trainings": len(alike)}
        for name in METRICS:
            mean |= interval(row.scores[name] for row in alike).figures(name)
        found.append(mean)
    return found


def _searched(search: Optional[Search]) -> dict[str, Any]:
    return search._asdict() if search else dict.fromkeys(Search._fields)
