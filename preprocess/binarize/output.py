"""Reports progress on standard error, and keeps the manifest of a folder that is being made."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fairseq_posenc.checkpoints.dictionary import MANIFEST
from fairseq_posenc.errors import UserError, printable_lines
from fairseq_posenc.files import write_whole
from fairseq_posenc.folders import checksum, is_made


def say(text: str) -> None:
    """Print a line on standard error at once, with control characters escaped."""
    print(printable_lines(text), file=sys.stderr, flush=True)


def format_counts(counts: Mapping[str, int]) -> str:
    """Format counts in a line: ``1,200 items, 3 long lines``."""
    return ", ".join(f"{value:,} {name.replace('_', ' ')}" for name, value in counts.items())


def describe_file(path: Path) -> dict[str, Any]:
    """Describe a written file for a manifest, by its size and checksum."""
    return {"bytes": path.stat().st_size, "sha256": checksum(path)}


def check_made(folder: Path, request: Mapping[str, Any]) -> bool:
    """Check whether a folder was made for a request; print a line if so.

    Raises:
        UserError: it was made for another request or by another program, or its name has a colon,
            at which fairseq would split it.
    """
    if ":" in str(folder):
        raise UserError(f"--out {folder}: fairseq splits names at ':'; name a folder without one")
    made = is_made(folder, request)
    if made:
        say(f"{folder} exists already, made from the same inputs with the same options")
    return made


class Manifest:
    """``manifest.json`` of a folder: an entry for each finished part, saved when it is finished."""

    def __init__(self, folder: Path, request: Mapping[str, Any]) -> None:
        self.folder = folder
        self._path = folder / MANIFEST
        self._entries: dict[str, Any] = {"plan": request}
        if self._path.exists():
            self._entries = json.loads(self._path.read_text("utf-8"))

    def read(self, *keys: str) -> Any:
        """Read an entry that this run or an interrupted one saved; None without one."""
        entry: Any = self._entries
        for key in keys:
            entry = (entry or {}).get(key)
        return entry

    def save(self, *keys_and_entry: Any) -> None:
        """Save an entry under its keys, given before it."""
        *keys, last, entry = keys_and_entry
        place = self._entries
        for key in keys:
            place = place.setdefault(key, {})
        place[last] = entry
        write_whole(self._path, json.dumps(self._entries, indent=1, ensure_ascii=False) + "\n")
