"""BLEU and chrF by sacreBLEU: of a whole test set, by length, and of one system against another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, Optional

from sacrebleu.metrics import BLEU, CHRF
from sacrebleu.significance import PairedTest

METRICS = {"BLEU": BLEU, "chrF2": CHRF}  # by sacreBLEU's names
# The most words of a source sentence in each group but the last.
_LENGTHS = (5, 10, 15, 20, 30, 50)


class Difference(NamedTuple):
    """How a system's score differs from that of the baseline."""

    metric: str  # one of :data:`METRICS`
    difference: float  # the system's score less the baseline's
    # of the paired test; None where both translate alike, of which sacreBLEU would say that it is
    # no chance
    p_value: Optional[float]


class LengthGroup(NamedTuple):
    """The sentences of similar length."""

    words: str  # the range of their numbers of words, such as `6-10`
    sentences: int  # how many there are
    bleu: dict[str, float]  # BLEU on them, by system; of all trainings together


class Scorer:
    """Measures translations of one test set, whose references are plain text."""

    def __init__(self, references: Sequence[str]) -> None:
        self.references = list(references)
        self._metrics = {name: kind(references=[references]) for name, kind in METRICS.items()}

    def scores(self, hypotheses: Sequence[str]) -> dict[str, float]:
        """Return the scores of a whole test set by metric."""
        return {
            name: metric.corpus_score(hypotheses, None).score
            for name, metric in self._metrics.items()
        }

    def signatures(self) -> dict[str, str]:
        """Return sacreBLEU's signature of each metric: all that changes its number."""
        return {name: str(metric.get_signature()) for name, metric in self._metrics.items()}

    def differences(
        self, systems: Mapping[str, Sequence[Sequence[str]]]
    ) -> tuple[dict[str, list[Difference]], dict[str, str]]:
        """Compare each system with the first; return differences, and the signatures by metric.

        With a training of each, by sacreBLEU's paired bootstrap. With several, by approximate
        randomization over trainings and sentences (Clark et al. 2011, "Better hypothesis testing
        for statistical machine translation"): the translations of a sentence change places between
        the n-th trainings of two systems, by chance. The score is of all trainings' translations
        together. All systems have as many trainings.
        """
        together = {name: list(chain(*trainings)) for name, trainings in systems.items()}
        baseline, *others = systems
        trainings = len(systems[baseline])
        references = [self.references * trainings]
        metrics = {name: kind(references=references) for name, kind in METRICS.items()}
        test = PairedTest(list(together.items()), metrics, None, "ar" if trainings > 1 else "bs")
        signatures, found = test()
        results: Any = found
        differences: dict[str, list[Difference]] = {name: [] for name in others}
        for index, name in enumerate(others, start=1):
            same = together[name] == together[baseline]
            for metric in METRICS:
                first, other = results[metric][0], results[metric][index]
                p_value = None if same else other.p_value
                differences[name].append(Difference(metric, other.score - first.score, p_value))
        return differences, {name: str(signature) for name, signature in signatures.items()}

    def by_length(
        self, sources: Sequence[str], systems: Mapping[str, Sequence[Sequence[str]]]
    ) -> list[LengthGroup]:
        """Return the BLEU of each system on sources of similar length, in words."""
        groups = []
        for low, high in zip((0, *_LENGTHS), (*_LENGTHS, None)):
            chosen = [
                number
                for number, source in enumerate(sources)
                if low < max(len(source.split()), 1) and (not high or len(source.split()) <= high)
            ]
            if chosen:
                words = f"{low + 1}-{high}" if high else f"over {low}"
                bleu = {name: self._bleu(each, chosen) for name, each in systems.items()}
                groups.append(LengthGroup(words, len(chosen), bleu))
        return groups

    def _bleu(self, trainings: Sequence[Sequence[str]], chosen: Sequence[int]) -> float:
        references = [self.references[number] for number in chosen] * len(trainings)
        hypotheses = [lines[number] for lines in trainings for number in chosen]
        return float(BLEU().corpus_score(hypotheses, [references]).score)
