"""Reads the documents of a corpus, also from the middle, and writes those drawn to text files."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from binarize.items import InvalidLine, TextRules, check_invalid, read_lines
from binarize.pool import Pool
from binarize.sources import Input, Place, read_chunks
from binarize.store import open_at
from fairseq_posenc.workbench.running.progress import say

from .draw import Drawn


class Parts(NamedTuple):
    r"""A chunk's text, cut where documents end: each line with ``\n``, the last part still open."""

    texts: list[bytes]
    counts: Counter[str]
    invalid: list[InvalidLine]


def cut_documents(data: bytes, text: TextRules) -> Parts:
    """Cut a chunk of a file where documents end, in a worker process."""
    lines, counts, invalid = read_lines(data, text)
    texts = [b""]
    for is_end, group in itertools.groupby(lines, lambda line: not line):
        if is_end:
            texts += [b""] * len(list(group))
        else:
            texts[-1] = "".join(f"{line}\n" for line in group).encode()
    return Parts(texts, counts, invalid)


@dataclass
class Documents:
    """Reads a corpus chunk by chunk."""

    inputs: Sequence[Input]
    place: Place  # beginning of the next chunk
    pending: bytes  # text of a document that the chunks before it began
    skip_invalid: bool  # leave invalid lines out, instead of stopping at the first

    def read(self, pool: Pool) -> Iterator[list[bytes]]:
        """Yield the documents that end in each chunk, and advance ``place`` and ``pending``.

        Raises:
            UserError: a line is invalid, or a file cannot be read.
        """
        for mark, parts in pool.map(read_chunks(self.inputs, self.place)):
            part, line = self.inputs[mark.place.part].part, mark.place.line - mark.lines
            for message in check_invalid(parts.invalid, part, line, self.skip_invalid):
                say(f"skipped {message}")
            first, *others = parts.texts
            pieces = [self.pending + first, *others]
            self.pending = b"" if mark.is_last else pieces.pop()
            self.place = mark.next
            yield [document for document in pieces if document]


class Texts:
    """``train/00.txt`` and so on, documents with an empty line behind each, and ``valid.txt``.

    Args:
        folder: folder of the files.
        count: number of training files, among which documents are dealt out in turn.
        sizes: result of :meth:`sync`, empty at first; everything written after it is dropped.
    """

    def __init__(self, folder: Path, count: int, sizes: Sequence[int]) -> None:
        train = folder / "train"
        train.mkdir(exist_ok=True)
        width = len(str(count - 1))
        self.paths = [train / f"{number:0{width}d}.txt" for number in range(count)]
        self.paths.append(folder / "valid.txt")
        sizes = sizes or [0] * len(self.paths)
        self._files = [open_at(path, size) for path, size in zip(self.paths, sizes)]

    def write(self, drawn: Drawn, number: int) -> None:
        """Write the drawn parts of a document; ``number`` counts the documents from 0."""
        if drawn.train:
            self._files[number % (len(self._files) - 1)].write(drawn.train + b"\n")
        self._files[-1].write(drawn.valid)

    def sync(self) -> list[int]:
        """Write everything to disk; return the size of each file in bytes."""
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
        return [file.tell() for file in self._files]

    def close(self) -> None:
        """Close the files as they are."""
        for file in self._files:
            file.close()
