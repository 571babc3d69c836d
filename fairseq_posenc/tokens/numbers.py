"""What every encoder is, and the dictionary it encodes with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from fairseq_posenc.errors import UserError

if TYPE_CHECKING:
    from fairseq.data import Dictionary  # importing it takes seconds


class Encoded(NamedTuple):
    """Lines as numbers, each with ``</s>`` at its end.

    Attributes:
        tokens: of all lines, one after the other.
        sizes: how many each line has, ``</s>`` included; int32.
    """

    tokens: np.ndarray
    sizes: np.ndarray


class Encoder(Protocol):
    """Turns lines without white space at their ends into numbers; "" is ``</s>`` alone."""

    def encode(self, lines: Sequence[str]) -> Encoded:
        """Return the lines as numbers of the dictionary."""
        ...


class Symbols(NamedTuple):
    """The numbers of a dictionary that have a meaning of their own, and its size."""

    bos: int
    pad: int
    eos: int
    unk: int
    size: int

    @classmethod
    def of(cls, dictionary: Dictionary) -> Symbols:
        """Return those of fairseq's dictionary."""
        return cls(
            dictionary.bos(), dictionary.pad(), dictionary.eos(), dictionary.unk(), len(dictionary)
        )

    @property
    def dtype(self) -> np.dtype:
        """The type of number that fairseq stores: uint16 up to 65,499 symbols."""
        from fairseq.data.indexed_dataset import best_fitting_int_dtype

        return np.dtype(best_fitting_int_dtype(self.size))


def load_dictionary(path: Path) -> Dictionary:
    """Read a dict.txt.

    Raises:
        UserError: it is not there, or not a dictionary.
    """
    from fairseq.data import Dictionary

    try:
        return Dictionary.load(str(path))
    except FileNotFoundError:
        raise UserError(f"--dict {path} is not there") from None
    except Exception as error:  # fairseq raises ValueError, RuntimeError, and plain Exception
        raise UserError(f"--dict {path}: {error}") from error
