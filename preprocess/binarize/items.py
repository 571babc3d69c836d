"""Converts a chunk of a corpus file to items of a data set; worker processes call it.

An item is a line of fairseq's data set: the tokens of a line or sentence, and ``</s>``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple, Optional

import numpy as np

from fairseq_posenc.errors import UserError
from fairseq_posenc.tokens.tokenizer import SymbolEncoder

from .formats import LineFormat, split_lines
from .sentences import split_sentences
from .sources import SourceChunk


class InvalidLine(NamedTuple):
    """A line of a chunk that is left out."""

    number: int  # in the chunk, from 0
    reason: str


class Items(NamedTuple):
    """The items of a chunk."""

    tokens: bytes  # of all items, in the data set's type (`token_dtype`)
    sizes: bytes  # of the items, including `</s>`, as int32
    # With `--empty-lines documents`: whether empty lines precede the first item, and follow the
    # last one (if all lines are empty, both). The writer separates documents there.
    begins_with_blank: bool
    ends_with_blank: bool
    # Sums by name: lines, invalid_lines, blank_lines, unknown_tokens, document_ends (empty items),
    # long_lines, cuts (items added by splitting these), items, tokens; some only with an option.
    counts: Counter[str]
    invalid: list[InvalidLine]  # left out


def read_lines(
    data: bytes, line_format: LineFormat, sentences: bool
) -> tuple[list[str], Counter[str], list[InvalidLine]]:
    """Read the lines of a chunk, stripped, and split into ``sentences`` if this is true.

    The second and third result are the ``counts`` and the ``invalid`` lines of :class:`Items`.
    """
    lines: list[str] = []
    invalid: list[InvalidLine] = []
    raw = split_lines(data.decode("utf-8", errors="surrogateescape"))
    for number, line in enumerate(raw):
        try:
            line.encode()  # fails for bytes that are not UTF-8, which were read as surrogates
            lines += line_format(line)
        except UnicodeEncodeError as error:
            byte = ord(error.object[error.start]) & 0xFF  # U+DC80 is byte 0x80, and so on
            reason = f"byte 0x{byte:02x} at column {error.start + 1} is not UTF-8"
            invalid.append(InvalidLine(number, reason))
        except ValueError as error:  # of the format
            invalid.append(InvalidLine(number, str(error)))
    if sentences:
        # An empty line has no sentences, but stays a line.
        parts = (tuple(split_sentences(line)) or ("",) for line in lines)
        lines = list(chain.from_iterable(parts))
    else:
        lines = [line.strip() for line in lines]
    counts = Counter(lines=len(raw), invalid_lines=len(invalid))
    counts["blank_lines"] = sum(not line or line.isspace() for line in raw)
    return lines, counts, invalid


def check_invalid(invalid: Sequence[InvalidLine], chunk: SourceChunk, treatment: str) -> list[str]:
    """Refuse the invalid lines of a chunk, or describe them, if they are to be skipped.

    Raises:
        UserError: a line is invalid, and ``treatment`` is ``error``, not ``skip``.
    """
    problems = [
        f"{chunk.file.path}, line {chunk.lines_before + number + 1}: {reason}"
        for number, reason in invalid
    ]
    if problems and treatment == "error":
        raise UserError(f"{problems[0]}; fix the file, or use --invalid-lines skip")
    return problems


def make_items(
    data: bytes,
    *,
    line_format: LineFormat,
    sentences: bool,
    empty_lines: str,
    longest_line: Optional[int],
    encoder: SymbolEncoder,
    unk: int,
) -> Items:
    """Encode a chunk of a file as items.

    Args:
        data: the chunk, whole lines.
        line_format: format of the corpus.
        sentences: whether lines are split into sentences.
        empty_lines: ``drop``, ``keep``, or ``documents``: one empty item between two documents.
        longest_line: maximum tokens of an item, or None.
        encoder: encodes lines.
        unk: the token id of ``<unk>``, which is counted.
    """
    lines, counts, invalid = read_lines(data, line_format, sentences)
    if empty_lines == "drop":
        lines = list(filter(None, lines))
    tokens, sizes = encoder.encode(lines)  # [T] in the data set's type; [N] of int32
    counts["unknown_tokens"] = int((tokens == unk).sum())
    begins, ends = False, False  # whether blanks are first, and last
    if empty_lines == "documents":
        is_blank = np.array([not line for line in lines], dtype=bool)
        is_kept, begins, ends = _keep_between_documents(is_blank, sizes > 1)  # not </s> alone
        counts["document_ends"] = int((is_kept & is_blank).sum())
        tokens = tokens[np.repeat(is_kept, sizes)]
        sizes = sizes[is_kept]
    if longest_line is not None:
        parts = split_long_sizes(sizes, longest_line)
        counts["long_lines"] = int((sizes > longest_line).sum())
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


def _keep_between_documents(
    is_blank: np.ndarray, is_text: np.ndarray
) -> tuple[np.ndarray, bool, bool]:
    """Keep one empty item between documents, and none before the first or after the last.

    With fairseq's ``--sample-break-mode complete``, an empty item is an extra ``</s>``, which
    RoBERTa has after each document. A line that is not empty but has no tokens would look the same,
    and is dropped.

    Args:
        is_blank: mask of the items that are empty lines, ``(N,)``.
        is_text: mask of the items with tokens besides ``</s>``, ``(N,)``.

    Returns:
        The mask of the items to keep, whether empty items precede the first text, and whether some
        follow the last; without any text, both say whether there are empty items.
    """
    result = is_text.copy()
    if not is_text.any():
        return result, bool(is_blank.any()), bool(is_blank.any())
    known = np.flatnonzero(is_blank | is_text)  # without other lines that have no tokens
    texts = np.flatnonzero(is_text)
    follows_text = np.concatenate([[False], is_text[known[:-1]]])
    result[known[follows_text & (known < texts[-1])]] = True  # a blank; texts are kept already
    return result, bool(known[0] < texts[0]), bool(known[-1] > texts[-1])
