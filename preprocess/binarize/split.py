"""Writes one split of a data-bin (train, valid or test); an interrupted one continues by part.

A split is a data set of fairseq in its mmap format: ``.bin`` has the tokens of all items, ``.idx``
the size of each. The items are the samples.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from fairseq.data import Dictionary

from fairseq_posenc.errors import UserError
from fairseq_posenc.tokens.data_set import write_index
from fairseq_posenc.tokens.tokenizer import Encoder, token_dtype

from .items import describe_invalid, make_items
from .options import BinarizeSettings
from .output import Manifest, describe_file, say
from .pool import map_chunks
from .shards import Extent
from .sources import read_chunks

_MAX_REPORTED = 10  # invalid lines; all are counted
_SIZE = np.dtype(np.int32)  # type of the sizes in an .idx file


@dataclass
class SplitProgress:
    """The entry of a split in the manifest; everything in it is synced to disk."""

    inputs: list[dict[str, Any]] = field(default_factory=list)  # the finished parts
    counts: dict[str, int] = field(default_factory=dict)  # of the finished parts
    invalid_lines: list[str] = field(default_factory=list)  # messages about the first ones
    outputs: dict[str, Any] = field(default_factory=dict)  # the files, once all parts are finished


class ItemFiles:
    """Appends items to ``PREFIX.bin``, and their sizes to ``PREFIX.sizes``, a temporary file.

    Args:
        prefix: path without suffix.
        dtype: type of the tokens, which fairseq chooses by the size of the dictionary.
        counts: ``items`` and ``tokens`` to keep; what an interrupted run wrote later is dropped.
    """

    def __init__(self, prefix: Path, dtype: np.dtype, counts: Counter[str]) -> None:
        self.dtype = dtype
        self.bin, self.sizes, self.index = (
            prefix.with_name(f"{prefix.name}.{suffix}") for suffix in ("bin", "sizes", "idx")
        )
        self._files = (
            open_at(self.bin, counts["tokens"] * dtype.itemsize),
            open_at(self.sizes, counts["items"] * _SIZE.itemsize),
        )

    def append(self, tokens: bytes, sizes: bytes) -> None:
        """Append items: the tokens of all items, and the size of each."""
        for file, data in zip(self._files, (tokens, sizes)):
            file.write(data)

    def sync(self) -> None:
        """Write everything to disk."""
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()


def open_at(path: Path, size: int) -> BinaryIO:
    """Open a file for writing after its first ``size`` bytes, and drop the rest."""
    file = open(path, "r+b" if size else "wb")  # noqa: SIM115  (closed by the caller)
    file.truncate(size)
    file.seek(size)
    return file


def write_split(
    name: str,
    parts: Sequence[Extent],
    settings: BinarizeSettings,
    encoder: Encoder,
    dictionary: Dictionary,
    manifest: Manifest,
) -> dict[str, int]:
    """Write a split, from the first part that is not finished; return its counts.

    Raises:
        UserError: a line is invalid, or the text is empty.
    """
    progress = SplitProgress(**(manifest.read("splits", name) or {}))
    counts = Counter(progress.counts)
    if progress.outputs:
        return progress.counts
    dtype = token_dtype(dictionary)
    empty_item = dtype.type(dictionary.eos()).tobytes(), _SIZE.type(1).tobytes()
    files = ItemFiles(manifest.folder / name, dtype, counts)
    encode = partial(make_items, settings=settings, encoder=encoder, unk=dictionary.unk())
    chunks = read_chunks(parts[len(progress.inputs) :])
    document_ended = True  # whether an empty item must precede the next item
    try:
        for chunk, items in map_chunks(chunks, settings.workers, encode):
            for message in describe_invalid(items.invalid, chunk, settings.skips_invalid):
                if len(progress.invalid_lines) < _MAX_REPORTED:
                    progress.invalid_lines.append(message)
                    say(f"skipped {message}")
            document_ended |= items.begins_with_blank
            if items.sizes:
                if document_ended and counts["items"] and settings.empty_lines == "documents":
                    files.append(*empty_item)
                    counts.update(items=1, tokens=1, document_ends=1)
                files.append(items.tokens, items.sizes)
                document_ended = items.ends_with_blank
            counts.update(items.counts)
            if chunk.ends_part:
                document_ended = True
                files.sync()
                progress.inputs.append({**chunk.part._asdict(), "lines": chunk.lines_before})
                progress.counts = dict(sorted(counts.items()))
                manifest.save("splits", name, vars(progress))
                say(f"{name}: {counts['tokens']:,} tokens")
    finally:
        files.close()
    if not counts["items"]:
        raise UserError(f"{name}: no line of its text is left")
    write_index(files.index, np.fromfile(files.sizes, _SIZE), dtype)
    progress.outputs = {path.name: describe_file(path) for path in (files.bin, files.index)}
    manifest.save("splits", name, vars(progress))
    return progress.counts
