"""BLEU-4 as some reports have it: NLTK's corpus BLEU on pieces, from 0 to 1.

It is no substitute for sacreBLEU's: its figure depends on how the text was cut, so that it
compares with nothing but itself on the same pieces. NLTK, which is optional, counts in one way
other than sacreBLEU does without smoothing: a translation of fewer than four pieces adds one n-gram
to those of each order that it has none of.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import Optional

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.tokens.pieces import Pieces
from fairseq_posenc.workbench.translation.checkpoint import DataBin

NAME = "BLEU-4 on pieces, 0 to 1"
_INSTALL = "NLTK is not installed (pip install nltk)"
_NO_PIECES = "there is no sentencepiece model to cut the text with; name its folder with --data"


class PieceBleu:
    """Measures translations of one test set, or says why it cannot."""

    def __init__(self, data: Optional[DataBin], references: Sequence[str]) -> None:
        self._corpus_bleu = None
        self.note = _INSTALL
        with suppress(ImportError):
            import nltk
            from nltk.translate.bleu_score import corpus_bleu

            self.note = _NO_PIECES
            with suppress(UserError):
                path = data.pieces(data.target) if data else None
                if path is not None:
                    self._corpus_bleu = corpus_bleu
                    self._model = Pieces(path).model
                    self._references = [[pieces] for pieces in self._cut(references)]
                    self.note = (
                        f"NLTK {nltk.__version__}, corpus_bleu without smoothing, {path.name}"
                    )

    def score(self, hypotheses: Sequence[str]) -> Optional[float]:
        """Return the score of plain translations, None if it cannot be had."""
        if self._corpus_bleu is None:
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is 0 where no 4-gram is right, which one sees
            return float(self._corpus_bleu(self._references, self._cut(hypotheses)))

    def _cut(self, lines: Sequence[str]) -> list[list[str]]:
        texts = [" ".join(line.split()) for line in lines]
        pieces: list[list[str]] = self._model.encode(texts, out_type=str)
        return pieces
