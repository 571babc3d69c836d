"""The text files that are made, continued after an interruption."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from binarize.store import open_at

from .draw import Drawn


class Texts:
    """``train/00.txt`` and so on, documents with an empty line behind each, and ``valid.txt``.

    Args:
        folder: where they are.
        count: of the files to train on, among which documents are dealt out in turn.
        sizes: what :meth:`sync` returned; what was written after it is dropped.
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
        """Write what was drawn of a document, the number of which is counted from 0."""
        if drawn.train:
            self._files[number % (len(self._files) - 1)].write(drawn.train + b"\n")
        self._files[-1].write(drawn.valid)

    def sync(self) -> list[int]:
        """Bring everything to the disk and return how much each file has."""
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
        return [file.tell() for file in self._files]

    def close(self) -> None:
        """Close the files as they are."""
        for file in self._files:
            file.close()
