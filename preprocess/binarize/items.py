"""Converts a chunk of a corpus file to items of a data set; worker processes call it.

An item is a line of fairseq's data set: the tokens of a line or sentence, and ``</s>``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from fairseq_posenc.errors import UserError
from fairseq_posenc.tokens.tokenizer import Encoder

from .formats import LineFormat, split_lines
from .options import BinarizeSettings
from .sentences import split_sentences
from .sources import SourceChunk


class InvalidLine(NamedTuple):
    """A line of a chunk that is left out."""

    number: int  # in the chunk, from 0
    reason: str


class Items(NamedTuple):
    """The items of a chunk."""

    tokens: bytes  # of all items, in the data set's type
    sizes: bytes  # of the items, `</s>` included, as int32
    # With `--empty-lines documents`, whether empty lines stand before the first item, and after the
    # last one; if all lines are empty, both are true. The writer puts an empty item there once an
    # item of the neighbouring chunk follows.
    begins_with_blank: bool
    ends_with_blank: bool
    counts: Counter[str]  # for the manifest
    invalid: list[InvalidLine]


class Lines(NamedTuple):
    """The lines of a chunk to encode; `counts` and `invalid` as in `Items`."""

    lines: list[str]
    counts: Counter[str]
    invalid: list[InvalidLine]


def read_lines(data: bytes, line_format: LineFormat, sentences: bool) -> Lines:
    """Read the lines of a chunk, stripped, and split into ``sentences`` if this is true."""
    lines: list[str] = []
    invalid: list[InvalidLine] = []
    raw = split_lines(data.decode("utf-8", errors="surrogateescape"))
    for number, line in enumerate(raw):
        try:
            line.encode()  # fails for bytes that are not UTF-8, which were read as surrogates
            lines += line_format(line)
        except UnicodeEncodeError as error:
            byte = ord(error.object[error.start]) & 0xFF  # U+DC80 + n stands for byte 0x80 + n
            reason = f"byte 0x{byte:02x} at column {error.start + 1} is not UTF-8"
            invalid.append(InvalidLine(number, reason))
        except ValueError as error:
            invalid.append(InvalidLine(number, str(error)))
    if sentences:
        # An empty line has no sentences, but stays a line.
        parts = (tuple(split_sentences(line)) or ("",) for line in lines)
        lines = list(chain.from_iterable(parts))
    else:
        lines = [line.strip() for line in lines]
    counts = Counter(lines=len(raw), invalid_lines=len(invalid))
    counts["blank_lines"] = sum(not line or line.isspace() for line in raw)
    return Lines(lines, counts, invalid)


def describe_invalid(
    invalid: Sequence[InvalidLine], chunk: SourceChunk, skips_invalid: bool
) -> list[str]:
    """Describe the invalid lines of a chunk, which are skipped, or refuse them.

    Raises:
        UserError: a line is invalid, and ``skips_invalid`` is False.
    """
    part = chunk.part
    origin = f" (counted from byte {part.start})" if part.start else ""
    problems = [
        f"{part.path}, line {chunk.lines_before + number + 1}: {reason}{origin}"
        for number, reason in invalid
    ]
    if problems and not skips_invalid:
        raise UserError(f"{problems[0]}; mend the file, or use --invalid-lines skip")
    return problems


def make_items(data: bytes, settings: BinarizeSettings, encoder: Encoder, unk: int) -> Items:
    """Encode a chunk of a file as items; ``unk`` is the token of unknown symbols."""
    lines, counts, invalid = read_lines(data, settings.line_format, settings.sentences)
    if settings.empty_lines == "drop":
        lines = list(filter(None, lines))
    tokens, sizes = encoder.encode(lines)
    counts["unknown_tokens"] = int((tokens == unk).sum())
    blank = np.fromiter((not line for line in lines), bool, len(lines))
    begins = ends = False  # with a blank
    is_kept = np.ones(len(sizes), dtype=bool)
    if settings.longest_line is not None:
        long = sizes > settings.longest_line
        counts["long_lines"] = int(long.sum())
        if settings.long_lines == "skip":
            is_kept = ~long
    if settings.empty_lines == "documents":
        has_tokens = sizes > 1  # besides </s>
        is_kept &= has_tokens | blank  # a line of text without tokens would seem to end a document
        is_kept, begins, ends = _keep_between_documents(is_kept, blank)
        counts["document_ends"] = int((is_kept & blank).sum())
    tokens = tokens[np.repeat(is_kept, sizes)]
    sizes = sizes[is_kept]
    if settings.longest_line is not None:
        parts = split_long_sizes(sizes, settings.longest_line)
        counts["cuts"] = len(parts) - len(sizes)
        sizes = parts
    counts.update(items=len(sizes), tokens=len(tokens))
    return Items(tokens.tobytes(), sizes.tobytes(), begins, ends, counts, invalid)


def split_long_sizes(sizes: np.ndarray, longest: int) -> np.ndarray:
    """Split long sizes into as few parts as possible, of nearly equal size: 9 into 5 and 4.

    Unequal parts might leave a last part of a single ``</s>``, which fairseq takes for the end of a
    document.
    """
    if (sizes <= longest).all():  # else a huge limit would overflow the type of the sizes
        return sizes
    parts = -(-sizes // longest)  # rounded up
    # For each part: the size and the number of parts of its item, and its index among them.
    size = np.repeat(sizes, parts)
    count = np.repeat(parts, parts)
    index = np.arange(len(count)) - np.repeat(np.cumsum(parts) - parts, parts)
    return (size // count + (index < size % count)).astype(sizes.dtype)


def _keep_between_documents(keep: np.ndarray, blank: np.ndarray) -> tuple[np.ndarray, bool, bool]:
    """Keep one empty item between documents, and none before the first and after the last.

    With fairseq's ``--sample-break-mode complete``, an empty item is an extra ``</s>``, which
    RoBERTa has after each document.

    Args:
        keep: mask of the items that are kept so far, ``(N,)``.
        blank: mask of the items that are empty lines, ``(N,)``.

    Returns:
        The mask of the items to keep, and whether the first and the last of them were preceded and
        followed by empty items.
    """
    kept = np.flatnonzero(keep)
    is_text = ~blank[kept]  # of the items that are kept so far, as are the next arrays
    if not is_text.any():
        return np.zeros_like(keep), len(kept) > 0, len(kept) > 0
    follows_text = np.concatenate([[False], is_text[:-1]])
    precedes_text = np.arange(len(kept)) < np.flatnonzero(is_text)[-1]
    result = np.zeros_like(keep)
    result[kept[is_text | (follows_text & precedes_text)]] = True
    return result, not is_text[0], not is_text[-1]
