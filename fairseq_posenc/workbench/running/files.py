"""Small helpers for files: checksums, JSON, and folders that the package ships."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from fairseq_posenc.errors import UserError, shortened

_BLOCK = 1 << 20  # bytes
_PACKAGE = Path(__file__).resolve().parents[2]


def checksum(path: Path, start: int = 0, end: int = sys.maxsize) -> str:
    """Compute the SHA-256 checksum of a file, or of its bytes from start to end."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        file.seek(start)
        while start < end and (block := file.read(min(_BLOCK, end - start))):
            digest.update(block)
            start += len(block)
    return digest.hexdigest()


def read_json(path: Path) -> Any:
    """Read a JSON file that a command wrote in order to continue from it.

    Raises:
        UserError: the file is damaged.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = shortened(" ".join(str(error).split()))
        raise UserError(f"{path}: cannot be read ({reason}); delete it to rebuild it") from None


def refuse_link(folder: Path) -> None:
    """Refuse a link as the folder of results: the files would be written somewhere else.

    Raises:
        UserError: the folder is a link; the message names its target.
    """
    if folder.is_symlink():
        raise UserError(
            f"--out {folder}: is a link to {folder.resolve()}; name that folder itself, or another"
        )


def shipped(name: str) -> Path:
    """Find a folder that lies inside the package in a wheel, and beside it in a checkout."""
    inside = _PACKAGE / name
    return inside if inside.is_dir() else _PACKAGE.parent / name
