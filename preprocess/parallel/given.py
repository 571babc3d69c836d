"""Sentencepieces that were learnt elsewhere: a model for each language, and one vocabulary.

That is the format of Helsinki-NLP's translation models (opus-mt): ``source.spm``, ``target.spm``
and ``vocab.json``, which numbers the pieces of both. fairseq gets the same pieces in the same order
after its own four symbols.
"""

from __future__ import annotations

import json
from pathlib import Path

from fairseq_posenc.errors import UserError
from parallel.files import read_bytes
from parallel.filters import Pieces
from parallel.pieces import SPECIAL, UNKNOWN, Encoder

VOCABULARY = "vocab.json"  # beside the model of the source language
_SYMBOLS = ("<s>", "<pad>", "</s>", "<unk>")  # fairseq's, in its order


class GivenPieces:
    """Two models and their vocabulary.

    Args:
        source: model of the source language.
        target: model of the target language.

    Raises:
        UserError: a file is missing, or is not what it should be.
    """

    def __init__(self, source: Path, target: Path) -> None:
        self.paths = (source, target, source.with_name(VOCABULARY))
        self.contents = tuple(read_bytes(path) for path in self.paths)
        numbers = self._numbers()
        self.pieces = [*_SYMBOLS, *(n for n in numbers if n not in _SYMBOLS)]
        self.encoders = tuple(map(self._encoder, self.paths[:2]))

    def _numbers(self) -> list[str]:
        """Return the pieces of the vocabulary in the order of their numbers."""
        path, content = self.paths[-1], self.contents[-1]
        try:
            numbers = json.loads(content)
            pieces: list[str] = sorted(numbers, key=numbers.__getitem__)
            whole = sorted(numbers.values()) == list(range(len(pieces)))
        except (ValueError, TypeError, AttributeError, RecursionError):
            whole = False
        if not whole:
            raise UserError(f"{path}: not a vocabulary, which gives each piece a number from 0 on")
        return pieces

    def _encoder(self, path: Path) -> Encoder:
        encoder = _GivenEncoder(path, self.pieces)
        if not encoder.known:
            raise UserError(f"{path}: none of its pieces is in {self.paths[-1]}")
        return encoder


class _GivenEncoder(Encoder):
    """Turns text into the numbers of a vocabulary that is not the model's own.

    Args:
        path: of a model file.
        pieces: the vocabulary, fairseq's symbols first.
    """

    def __init__(self, path: Path, pieces: list[str]) -> None:
        super().__init__(path)
        numbers = {piece: number for number, piece in enumerate(pieces)}
        # What a model can write and the vocabulary has not is unknown, as with the models' own.
        self._numbers = [numbers.get(piece, UNKNOWN) for piece in self._pieces]
        self.known = sum(number >= SPECIAL for number in self._numbers)
        self._pieces = pieces

    def encode(self, lines: list[str]) -> Pieces:
        """Return the numbers of each line's pieces."""
        return [[self._numbers[number] for number in line] for line in super().encode(lines)]
