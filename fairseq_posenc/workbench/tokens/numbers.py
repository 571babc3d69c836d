"""The interface of encoders, and the special symbols of a dictionary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    from fairseq.data import Dictionary  # importing it takes seconds


class Encoded(NamedTuple):
    """Lines as numbers, each with ``</s>`` at its end."""

    tokens: np.ndarray  # tokens of all lines, one after the other, `[T]`
    sizes: np.ndarray  # tokens of each line, `</s>` included, `[N]`, int32


class Encoder(Protocol):
    """Turns lines without white space at their ends into numbers; "" is ``</s>`` alone."""

    def encode(self, lines: Sequence[str]) -> Encoded:
        """Encode lines as numbers of the dictionary."""
        ...


class Symbols(NamedTuple):
    """The special symbols of a dictionary, and its size."""

    bos: int
    pad: int
    eos: int
    unk: int
    size: int

    @classmethod
    def from_dictionary(cls, dictionary: Dictionary) -> Symbols:
        """Take the symbols of a fairseq dictionary."""
        return cls(
            dictionary.bos(), dictionary.pad(), dictionary.eos(), dictionary.unk(), len(dictionary)
        )

    @property
    def dtype(self) -> np.dtype:
        """The type of the numbers that fairseq stores: uint16 up to 65,499 symbols."""
        from fairseq.data.indexed_dataset import best_fitting_int_dtype

        return np.dtype(best_fitting_int_dtype(self.size))
