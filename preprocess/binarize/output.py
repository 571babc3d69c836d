"""Reports progress; makes complete folders with a manifest; opens files to continue them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from fairseq_posenc.checkpoints.dictionary import MANIFEST
from fairseq_posenc.errors import UserError, counted, printable_lines
from fairseq_posenc.files import write_whole
from fairseq_posenc.folders import checksum, is_made, whole_folder


def say(text: str) -> None:
    """Print a line on standard error at once, with control characters escaped."""
    print(printable_lines(text), file=sys.stderr, flush=True)


def format_counts(counts: Mapping[str, int]) -> str:
    """Format counts on one line: ``1,200 items, 3 long lines``."""
    return ", ".join(counted(value, name.replace("_", " ")) for name, value in counts.items())


def describe_file(path: Path) -> dict[str, Any]:
    """Describe a written file for a manifest, by its size and checksum."""
    return {"bytes": path.stat().st_size, "sha256": checksum(path)}


class Manifest:
    """``manifest.json`` of a folder: the request, and sections with entries for what is finished.

    An interrupted run continues from its entries (``whole_folder`` refuses another request).
    """

    def __init__(self, folder: Path, request: Mapping[str, Any]) -> None:
        self.folder = folder
        self._path = folder / MANIFEST
        self.entries: dict[str, Any] = {"plan": request}  # tasks and users read it under this name
        if self._path.exists():
            self.entries = json.loads(self._path.read_text("utf-8"))

    def read(self, section: str, name: str) -> Any:
        """Read an entry of a section, such as ``splits``; None if it is not finished."""
        return self.entries.get(section, {}).get(name)

    def save(self, section: str, name: str, entry: Any) -> None:
        """Save an entry of a section to disk."""
        self.entries.setdefault(section, {})[name] = entry
        write_whole(self._path, json.dumps(self.entries, indent=1, ensure_ascii=False) + "\n")


def make_folder(folder: Path, request: Mapping[str, Any], fill: Callable[[Manifest], None]) -> None:
    """Make a folder, unless it was made for the same request.

    Args:
        folder: the folder.
        request: everything that its content depends on.
        fill: writes the files that an interrupted run has not finished.

    Raises:
        UserError: the folder was made for another request or by another program, or its name has a
            colon, at which fairseq would split it.
    """
    if ":" in str(folder):
        raise UserError(f"--out {folder}: fairseq splits names at ':'; name a folder without one")
    if is_made(folder, request):  # raises if it was made otherwise
        say(f"{folder} exists already, made from the same inputs with the same options")
        return
    with whole_folder(folder, request) as unfinished:  # renamed to `folder` at the end
        fill(Manifest(unfinished, request))
    say(f"wrote {folder}")


def open_at(path: Path, size: int) -> BinaryIO:
    """Open a file for writing after its first ``size`` bytes; drop what an interrupted run left.

    Raises:
        UserError: the file is shorter than that, or missing.
    """
    if size and (not path.is_file() or path.stat().st_size < size):
        raise UserError(f"{path} has lost bytes since it was saved: delete {path.parent}")
    file = open(path, "r+b" if size else "wb")  # noqa: SIM115  (closed by the caller)
    file.truncate(size)
    file.seek(size)
    return file


def sync(*files: BinaryIO) -> None:
    """Write everything in open files to disk."""
    for file in files:
        file.flush()
        os.fsync(file.fileno())
