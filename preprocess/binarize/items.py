"""One chunk of a corpus file as items of a data set: what a worker process does."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from multiprocessing import parent_process
from os import _exit
from typing import NamedTuple, Optional

import numpy as np

from fairseq_posenc.tokens.numbers import Encoder, Symbols
from fairseq_posenc.tokens.symbols import Splitter

from . import lengths
from .formats import LineFormat, split_lines
from .sentences import split_sentences


@dataclass(frozen=True)
class Text:
    """How the lines of a corpus become the lines that are encoded.

    Attributes:
        lines: what a line of the file holds.
        sentences: cut lines into sentences.
        empty_lines: ``drop``; ``keep``, each as ``</s>`` alone; or ``documents``: one such item
            between two documents, however many empty lines there are.
    """

    lines: LineFormat
    sentences: bool
    empty_lines: str


@dataclass(frozen=True)
class Numbers:
    """How lines become numbers.

    Attributes:
        encoder: text to numbers.
        symbols: of its dictionary.
        longest_line: items have at most so many tokens; None for no limit.
        long_lines: what to do with longer ones: ``split`` or ``skip``.
    """

    encoder: Encoder
    symbols: Symbols
    longest_line: Optional[int]
    long_lines: str


class Items(NamedTuple):
    """Part of a data set.

    Attributes:
        tokens: of all items, as bytes of the data set's type.
        sizes: the items' sizes, as bytes of int32.
        begins_document: with ``documents``, whether an empty line came before the first item.
        ends_document: the same, after the last item; both when there are no items.
        counts: what the manifest says.
        invalid: for each line left out, its number in the chunk from 0, and what is wrong with it.
    """

    tokens: bytes
    sizes: bytes
    begins_document: bool
    ends_document: bool
    counts: Counter[str]
    invalid: list[tuple[int, str]]


class Lines(NamedTuple):
    """The lines of a chunk that are to be encoded, with counts and lines left out."""

    lines: list[str]
    counts: Counter[str]
    invalid: list[tuple[int, str]]


def read_lines(data: bytes, text: Text) -> Lines:
    """Return a chunk's lines, stripped, sentences apart if wanted, empty ones as ""."""
    lines: list[str] = []
    invalid: list[tuple[int, str]] = []
    raw = split_lines(data.decode("utf-8", errors="surrogateescape"))
    for number, line in enumerate(raw):
        try:
            line.encode()
            lines += text.lines(line)
        except UnicodeEncodeError as error:
            byte = ord(error.object[error.start]) & 0xFF
            invalid.append((number, f"byte 0x{byte:02x} at column {error.start + 1} is not UTF-8"))
        except ValueError as error:
            invalid.append((number, str(error)))
    if text.sentences:
        lines = list(chain.from_iterable(tuple(split_sentences(line)) or ("",) for line in lines))
    else:
        lines = [line.strip() for line in lines]
    if text.empty_lines == "drop":
        lines = [line for line in lines if line]
    counts = Counter(lines=len(raw), invalid_lines=len(invalid))
    counts["blank_lines"] = sum(not line or line.isspace() for line in raw)
    return Lines(lines, counts, invalid)


def make_items(data: bytes, text: Text, numbers: Numbers) -> Items:
    """Return a chunk of a file as items."""
    lines, counts, invalid = read_lines(data, text)
    tokens, sizes = numbers.encoder.encode(lines)
    counts.update(_count_symbols(tokens, sizes, numbers.symbols))
    blank = np.fromiter((not line for line in lines), bool, len(lines))
    begins = ends = False
    keep = np.ones(len(sizes), dtype=bool)
    if numbers.longest_line is not None:
        long = sizes > numbers.longest_line
        counts["long_lines"] = int(long.sum())
        keep = ~long if numbers.long_lines == "skip" else keep
    if text.empty_lines == "documents":
        keep &= (sizes > 1) | blank  # what the encoder makes nothing of is no document's end
        keep, begins, ends = lengths.between_documents(keep, blank)
        counts["document_ends"] = int((keep & blank).sum())
    tokens, sizes = tokens[np.repeat(keep, sizes)], sizes[keep]
    if numbers.longest_line is not None:
        sizes = lengths.split_long(sizes, numbers.longest_line)
    counts.update(items=len(sizes), tokens=len(tokens))
    return Items(tokens.tobytes(), sizes.tobytes(), begins, ends, counts, invalid)


def _count_symbols(tokens: np.ndarray, sizes: np.ndarray, symbols: Symbols) -> dict[str, int]:
    ends = int((tokens == symbols.eos).sum()) - len(sizes)
    special = int(((tokens == symbols.bos) | (tokens == symbols.pad)).sum())
    return {"unknown_tokens": int((tokens == symbols.unk).sum()), "special_tokens": special + ends}


def count_symbols(data: bytes, text: Text, split: Splitter) -> tuple[Counter[str], Lines]:
    """Return how often each symbol occurs in a chunk."""
    read = read_lines(data, text)
    counter: Counter[str] = Counter()
    for symbols in split(read.lines):
        counter.update(symbols)
    return counter, Lines([], read.counts, read.invalid)


def start_worker() -> None:
    """Let the main process alone answer Ctrl-C, and end when it ends, even if it is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):  # which the main process answers likewise
        signal.signal(number, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    _exit(1)


def describe_invalid(invalid: Sequence[tuple[int, str]], path: str, line: int) -> Iterator[str]:
    """Yield a message for each line left out of a chunk that begins after ``line`` lines."""
    for number, reason in invalid:
        yield f"{path}, line {line + number + 1}: {reason}"
