"""Computes BLEU and chrF with sacreBLEU, for a test set and by length, and compares systems.

It also computes the BLEU-4 of some reports: NLTK's corpus BLEU on pieces, from 0 to 1. That figure
depends on the pieces, so it is comparable only between texts cut into the same ones. NLTK, which is
optional, differs from sacreBLEU without smoothing in one respect: it counts one n-gram for every
n-gram order for which a translation is too short.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from itertools import chain, pairwise
from typing import Any, Optional

from sacrebleu.metrics import BLEU, CHRF
from sacrebleu.significance import PairedTest

from fairseq_posenc.errors import UserError
from fairseq_posenc.tokens.pieces import Pieces
from fairseq_posenc.workbench.results.record import Row
from fairseq_posenc.workbench.translation.checkpoint import ParallelDataBin

METRICS = {"BLEU": BLEU, "chrF2": CHRF}  # sacreBLEU's name -> metric
# Most words of a source sentence in each group; longer ones are the last group.
_MAX_WORDS = (5, 10, 15, 20, 30, 50)
PIECE_BLEU = "BLEU-4 on pieces, 0 to 1"


class Scorer:
    """Scores translations of a test set, whose references are plain text."""

    def __init__(self, references: Sequence[str]) -> None:
        self.references = list(references)
        self._metrics = {name: metric(references=[references]) for name, metric in METRICS.items()}

    def score(self, hypotheses: Sequence[str]) -> dict[str, float]:
        """Compute the scores of the whole test set by metric."""
        return {
            name: metric.corpus_score(hypotheses, None).score
            for name, metric in self._metrics.items()
        }

    def signatures(self) -> dict[str, str]:
        """Get sacreBLEU's signature of each metric, which lists everything that affects it."""
        return {name: str(metric.get_signature()) for name, metric in self._metrics.items()}

    def compare(
        self, systems: Mapping[str, Sequence[Sequence[str]]]
    ) -> tuple[list[Row], dict[str, str]]:
        """Compare each system with the first, by sacreBLEU's tests.

        Systems with a single training are compared by paired bootstrap. Those with several, equally
        many, are compared by approximate randomization over trainings and sentences (Clark et al.
        2011, "Better hypothesis testing for statistical machine translation"): the translations of
        a sentence by the n-th trainings of two systems are exchanged at random, and the score is
        that of the translations of all trainings. ``systems`` has these translations by system.

        Returns:
            Rows with the system, the metric, the difference of its score, and the p-value (None if
            both have the same translations, which sacreBLEU would call significant); and the
            signatures by metric.
        """
        joined = {name: list(chain(*trainings)) for name, trainings in systems.items()}
        baseline, *others = systems
        trainings = len(systems[baseline])
        references = [self.references * trainings]
        metrics = {name: metric(references=references) for name, metric in METRICS.items()}
        # approximate randomization, or paired bootstrap
        method = "ar" if trainings > 1 else "bs"
        test = PairedTest(list(joined.items()), metrics, None, method)
        results: Any  # metric -> results of the systems; typed too narrowly by sacreBLEU
        signatures, results = test()
        differences: list[Row] = []
        for index, name in enumerate(others, start=1):
            is_same = joined[name] == joined[baseline]
            for metric in METRICS:
                first = results[metric][0]
                other = results[metric][index]
                row = {"system": name, "metric": metric, "difference": other.score - first.score}
                differences.append({**row, "p_value": None if is_same else other.p_value})
        return differences, {name: str(signature) for name, signature in signatures.items()}

    def score_by_length(
        self, sources: Sequence[str], systems: Mapping[str, Sequence[Sequence[str]]]
    ) -> list[Row]:
        """Compute the BLEU of each system, over all trainings, by the length of the source.

        A row has the range of words, such as ``6-10``, the number of sentences, system and BLEU.
        """
        rows: list[Row] = []
        lengths = [max(len(source.split()), 1) for source in sources]
        for low, high in pairwise((0, *_MAX_WORDS, math.inf)):
            numbers = [number for number, length in enumerate(lengths) if low < length <= high]
            if not numbers:
                continue
            words = f"over {low}" if high == math.inf else f"{low + 1}-{high}"
            for name, trainings in systems.items():
                references = [self.references[number] for number in numbers] * len(trainings)
                hypotheses = [lines[number] for lines in trainings for number in numbers]
                bleu = float(BLEU().corpus_score(hypotheses, [references]).score)
                rows.append(
                    {"words": words, "sentences": len(numbers), "system": name, "BLEU": bleu}
                )
        return rows


class PieceBleu:
    """Scores translations by BLEU-4 on pieces; ``note`` has its signature, or why it cannot."""

    def __init__(self, data: Optional[ParallelDataBin], references: Sequence[str]) -> None:
        self._corpus_bleu = None
        try:
            import nltk
            from nltk.translate.bleu_score import corpus_bleu
        except ImportError:
            self.note = "NLTK is not installed (pip install nltk)"
            return
        if data is None:
            self.note = "no sentencepiece model is known; name its folder with --data"
            return
        try:
            path = data.find_pieces(data.target)
            self._model = Pieces(path).model
        except UserError as error:  # it is missing or damaged
            self.note = str(error)
            return
        self._references = [[pieces] for pieces in self._cut_into_pieces(references)]
        self._corpus_bleu = corpus_bleu
        self.note = f"NLTK {nltk.__version__}, corpus_bleu without smoothing, {path.name}"

    def score(self, hypotheses: Sequence[str]) -> Optional[float]:
        """Compute the score of translations in plain text; None if it cannot be computed."""
        if self._corpus_bleu is None:
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about a score of 0 because no 4-gram is right
            return float(self._corpus_bleu(self._references, self._cut_into_pieces(hypotheses)))

    def _cut_into_pieces(self, lines: Sequence[str]) -> list[list[str]]:
        texts = [" ".join(line.split()) for line in lines]
        pieces: list[list[str]] = self._model.encode(texts, out_type=str)
        return pieces
