"""Symbols that can be read off a text: its words, its characters, its sentencepieces.

What fairseq does with a line of symbols between spaces, without writing that line.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from fairseq.data import Dictionary

from fairseq_posenc.errors import UserError
from fairseq_posenc.tokens.numbers import Encoded, Symbols

SPACE = "▁"  # sentencepiece's sign for a space


class Splitter(Protocol):
    """Cuts lines into symbols."""

    def __call__(self, lines: Sequence[str]) -> Iterable[Sequence[str]]:
        """Return each line's symbols."""
        ...


def words(lines: Sequence[str]) -> Iterable[Sequence[str]]:
    """Words are what stands between white space, as for fairseq."""
    return (line.split() for line in lines)


class Characters(NamedTuple):
    """Every character is a symbol; white space is none, or ``▁`` for each run of it."""

    keep_spaces: bool

    def __call__(self, lines: Sequence[str]) -> Iterable[Sequence[str]]:
        """Return each line's characters."""
        between = SPACE if self.keep_spaces else ""
        return (between.join(line.split()) for line in lines)


class Pieces:
    """Sentencepieces; what the model does not know is its unknown piece.

    Args:
        model: file that sentencepiece's training wrote.

    Raises:
        UserError: it is not a model, or has pieces that no fairseq dictionary can hold.
    """

    def __init__(self, model: Path) -> None:
        import sentencepiece

        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
        except (OSError, RuntimeError) as error:
            message = " ".join(str(error).split())
            raise UserError(f"--sentencepiece-model {model}: {message}") from None
        self._names = [
            self._processor.id_to_piece(i) for i in range(self._processor.get_piece_size())
        ]
        self.unknown = self._names[self._processor.unk_id()]
        broken = [name for name in self._names if len(name.split()) != 1]
        if broken:
            raise UserError(
                f"--sentencepiece-model {model} has the piece {broken[0]!r}: fairseq separates "
                "symbols by white space; train a model without it"
            )

    def __call__(self, lines: Sequence[str]) -> Iterable[Sequence[str]]:
        """Return each line's pieces."""
        encoded = self._processor.encode(list(lines), num_threads=1)
        return ([self._names[piece] for piece in line] for line in encoded)

    def dictionary(self) -> Dictionary:
        """Return a dictionary of all pieces that can occur in a text, in the model's order."""
        made, model = Dictionary(), self._processor
        for number, name in enumerate(self._names):
            if not model.is_control(number) and not model.is_unknown(number):
                made.add_symbol(name)
        return made


class SymbolEncoder:
    """Looks symbols up in a dictionary.

    Args:
        split: cuts lines into symbols.
        dictionary: fairseq's.
    """

    def __init__(self, split: Splitter, dictionary: Dictionary) -> None:
        self._split = split
        self._symbols = Symbols.of(dictionary)
        self._indices = dict(dictionary.indices)

    def encode(self, lines: Sequence[str]) -> Encoded:
        """Return the lines as numbers; see :class:`Encoder`."""
        find, unk, eos = self._indices.get, self._symbols.unk, self._symbols.eos
        encoded = [[*(find(s, unk) for s in line), eos] for line in self._split(lines)]
        sizes = np.fromiter(map(len, encoded), np.int32, len(encoded))
        total = int(sizes.sum())
        tokens = np.fromiter(chain.from_iterable(encoded), self._symbols.dtype, total)
        return Encoded(tokens, sizes)
