"""Encodes text by a dictionary, finds the characters of tokens, and writes data sets.

A splitter turns lines into *symbols*, fairseq's word for words, characters or pieces ("a bee" into
"a", "bee"), and a dictionary has their token ids. SQuAD's answers must be parts of the original
text, so the tokens of a tokenizer also know their characters in it.
"""

import struct
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fairseq_posenc.errors import printable_lines

if TYPE_CHECKING:
    from fairseq.data import Dictionary  # importing it takes seconds
    from typing_extensions import Self

ENCODER_JSON, MERGES = "encoder.json", "vocab.bpe"  # names of the files of GPT-2's BPE
PIECES = "sentencepiece.model"  # name of the file of a sentencepiece model, in a data-bin
SPACE = "▁"  # sentencepiece's symbol of a space


class Encoded(NamedTuple):
    """Encoded lines, each of which ends with ``</s>``."""

    tokens: np.ndarray  # token ids of all lines, one after the other, `[T]`
    sizes: np.ndarray  # number of tokens of each of N lines, with `</s>`, `[N]`, int32


def token_dtype(dictionary: "Dictionary") -> np.dtype:
    """Choose the type in which fairseq stores token ids: uint16 for up to 65,499 symbols."""
    from fairseq.data.indexed_dataset import best_fitting_int_dtype

    return np.dtype(best_fitting_int_dtype(len(dictionary)))


class TextTokens(NamedTuple):
    """Tokens of a text and their characters, ``text[start:end]``: of a byte, its whole letter."""

    ids: np.ndarray  # token ids of the fairseq dictionary, `[T]`
    starts: np.ndarray  # index of the first character after leading white space, `[T]`, ascending
    ends: np.ndarray  # index after the last character, `[T]`, ascending

    @classmethod
    def from_spans(cls, text: str, ids: Sequence[int], spans: Iterable[tuple[int, int]]) -> "Self":
        """Build tokens from their spans, which include leading white space."""
        starts, ends = [], []
        for start, end in spans:
            visible = len(text[start:end].lstrip())
            starts.append(end - visible if visible else start)  # white space alone is kept
            ends.append(end)
        return cls(np.array(ids, np.int64), np.array(starts, np.int64), np.array(ends, np.int64))

    def covering(self, start: int, end: int) -> tuple[int, int] | None:
        """Find the first and the last token that overlap a span of characters; None without any."""
        first = int(np.searchsorted(self.ends, start, side="right"))  # the first with end > start
        last = int(np.searchsorted(self.starts, end, side="left")) - 1  # the last with start < end
        return (first, last) if first <= last else None


def find_spans(text: str, sizes: np.ndarray) -> list[tuple[int, int]]:
    """Compute the character spans of tokens from their sizes in UTF-8 bytes, ``[T]``, above 0."""
    codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    # UTF-8 needs a second, third and fourth byte from these code points on.
    widths = 1 + sum((codes >= limit).astype(np.int64) for limit in (0x80, 0x800, 0x10000))
    character = np.repeat(np.arange(len(text)), widths)  # index of the character of each byte
    ends = np.cumsum(sizes)
    return list(zip(character[ends - sizes].tolist(), (character[ends - 1] + 1).tolist()))


# Splits lines into symbols, which the caller reads once: they may be an iterator.
Splitter = Callable[[Sequence[str]], Iterable[Iterable[str]]]


def split_words(lines: Sequence[str]) -> Iterable[Sequence[str]]:
    """Split each line at white space, as fairseq does."""
    return (line.split() for line in lines)


def split_characters(lines: Sequence[str], between: str) -> Iterable[Sequence[str]]:
    """Split each line into characters; white space becomes ``between``, a character or nothing."""
    return (between.join(line.split()) for line in lines)


class SymbolEncoder:
    """Encodes lines: splits them into symbols, and looks these up in a dictionary."""

    def __init__(self, split: Splitter, dictionary: "Dictionary") -> None:
        self._split = split
        self._indices = dict(dictionary.indices)
        self._unk, self._eos = dictionary.unk(), dictionary.eos()
        self._dtype = token_dtype(dictionary)

    def index(self, symbol: str) -> int:
        """Look up the id of a symbol; that of ``<unk>`` if the dictionary lacks it."""
        return self._indices.get(symbol, self._unk)

    def encode(self, lines: Sequence[str]) -> Encoded:
        """Encode lines that neither begin nor end with white space; "" becomes ``</s>`` alone."""
        find, unk = self._indices.get, repeat(self._unk)  # as `index`, but faster
        encoded = [[*map(find, symbols, unk), self._eos] for symbols in self._split(lines)]
        sizes = np.fromiter(map(len, encoded), np.int32, len(encoded))
        tokens = np.fromiter(chain.from_iterable(encoded), self._dtype, int(sizes.sum()))
        return Encoded(tokens, sizes)


def warn_of_unknown(name: str, unknown: int, tokens: int) -> None:
    """Print a warning if more than half of a text's tokens are ``<unk>``.

    Args:
        name: of the text.
        unknown: number of its ``<unk>``, also in parts left out, so it may be above ``tokens``.
        tokens: number of its tokens that were written, without special symbols.
    """
    if 2 * unknown > tokens:
        message = (
            f"warning: {name}: {unknown:,} of {max(unknown, tokens):,} tokens are <unk>; is the "
            "dictionary that of this text and these tokens?"
        )
        print(printable_lines(message), file=sys.stderr)


def write_items(prefix: Path, items: Encoded) -> None:
    """Write fairseq's ``PREFIX.bin``, the tokens in the type of the dictionary, and ``.idx``."""
    items.tokens.tofile(f"{prefix}.bin")
    write_index(Path(f"{prefix}.idx"), items.sizes, items.tokens.dtype)


def write_index(path: Path, sizes: np.ndarray, dtype: np.dtype) -> None:
    """Write an index in fairseq's format; fairseq's lists would need 40 bytes or more per item.

    Args:
        path: the ``.idx`` file.
        sizes: number of tokens of each of N items, ``[N]``, int32.
        dtype: type of the tokens.
    """
    from fairseq.data.indexed_dataset import MMapIndexedDataset, _dtype_header_code

    offsets = np.zeros(len(sizes), np.int64)  # of the first bytes of the items
    np.cumsum(sizes[:-1], out=offsets[1:])
    offsets *= dtype.itemsize
    with open(path, "wb") as file:
        file.write(MMapIndexedDataset.Index._HDR_MAGIC)
        file.write(struct.pack("<QBQ", 1, _dtype_header_code(dtype.type), len(sizes)))  # version 1
        sizes.tofile(file)
        offsets.tofile(file)
