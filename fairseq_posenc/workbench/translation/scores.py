"""BLEU and chrF by sacreBLEU: of a whole test set, by length, and of one system against another.

Also BLEU-4 as some reports have it: NLTK's corpus BLEU on pieces, from 0 to 1. It is no substitute
for sacreBLEU's: its figure depends on how the text was cut, so that it compares with nothing but
itself on the same pieces. NLTK, which is optional, counts in one way other than sacreBLEU does
without smoothing: a translation of fewer than four pieces adds one n-gram to those of each order
that it has none of.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, Optional

from sacrebleu.metrics import BLEU, CHRF
from sacrebleu.significance import PairedTest

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.results.record import Row
from fairseq_posenc.workbench.tokens.pieces import Pieces
from fairseq_posenc.workbench.translation.checkpoint import ParallelDataBin

METRICS = {"BLEU": BLEU, "chrF2": CHRF}  # sacreBLEU's name -> metric
# The most words of a source sentence in each group but the last.
_LENGTHS = (5, 10, 15, 20, 30, 50)
PIECE_BLEU = "BLEU-4 on pieces, 0 to 1"
_INSTALL = "NLTK is not installed (pip install nltk)"
_NO_PIECES = "there is no sentencepiece model to cut the text with; name its folder with --data"


class Scorer:
    """Measures translations of one test set, whose references are plain text."""

    def __init__(self, references: Sequence[str]) -> None:
        self.references = list(references)
        self._metrics = {name: kind(references=[references]) for name, kind in METRICS.items()}

    def score(self, hypotheses: Sequence[str]) -> dict[str, float]:
        """Compute the scores of a whole test set by metric."""
        return {
            name: metric.corpus_score(hypotheses, None).score
            for name, metric in self._metrics.items()
        }

    def signatures(self) -> dict[str, str]:
        """Get sacreBLEU's signature of each metric: all that changes its number."""
        return {name: str(metric.get_signature()) for name, metric in self._metrics.items()}

    def compare(
        self, systems: Mapping[str, Sequence[Sequence[str]]]
    ) -> tuple[list[Row], dict[str, str]]:
        """Compare each system with the first; return differences, and the signatures by metric.

        A row has the system, the metric, the difference of its score, and the p-value: None where
        both have the same translations, which sacreBLEU would call significant.

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
        signatures, tested = test()
        results: Any = tested
        differences: list[Row] = []
        for index, name in enumerate(others, start=1):
            same = together[name] == together[baseline]
            for metric in METRICS:
                first, other = results[metric][0], results[metric][index]
                row = {"system": name, "metric": metric, "difference": other.score - first.score}
                differences.append({**row, "p_value": None if same else other.p_value})
        return differences, {name: str(signature) for name, signature in signatures.items()}

    def score_by_length(
        self, sources: Sequence[str], systems: Mapping[str, Sequence[Sequence[str]]]
    ) -> list[Row]:
        """Compute the BLEU of each system, all trainings together, by the source's words.

        A row has the range of words, such as ``6-10``, the number of sentences, system and BLEU.
        """
        rows: list[Row] = []
        for low, high in zip((0, *_LENGTHS), (*_LENGTHS, None)):
            chosen = [
                number
                for number, source in enumerate(sources)
                if low < max(len(source.split()), 1) and (not high or len(source.split()) <= high)
            ]
            group = {"words": f"{low + 1}-{high}" if high else f"over {low}"}
            for name, trainings in systems.items() if chosen else ():
                references = [self.references[number] for number in chosen] * len(trainings)
                hypotheses = [lines[number] for lines in trainings for number in chosen]
                bleu = float(BLEU().corpus_score(hypotheses, [references]).score)
                rows.append({**group, "sentences": len(chosen), "system": name, "BLEU": bleu})
        return rows


class PieceBleu:
    """Measures translations of one test set, or says why it cannot."""

    def __init__(self, data: Optional[ParallelDataBin], references: Sequence[str]) -> None:
        self._corpus_bleu, self.note = None, _INSTALL
        with suppress(ImportError, UserError):
            import nltk
            from nltk.translate.bleu_score import corpus_bleu

            self.note = _NO_PIECES
            if data:
                path = data.find_pieces(data.target)
                self._model = Pieces(path).model
                self._references = [[pieces] for pieces in self._cut(references)]
                self._corpus_bleu = corpus_bleu
                self.note = f"NLTK {nltk.__version__}, corpus_bleu without smoothing, {path.name}"

    def score(self, hypotheses: Sequence[str]) -> Optional[float]:
        """Compute the score of plain translations; None if it cannot be measured."""
        if self._corpus_bleu is None:
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is 0 where no 4-gram is right, which one sees
            return float(self._corpus_bleu(self._references, self._cut(hypotheses)))

    def _cut(self, lines: Sequence[str]) -> list[list[str]]:
        texts = [" ".join(line.split()) for line in lines]
        pieces: list[list[str]] = self._model.encode(texts, out_type=str)
        return pieces
