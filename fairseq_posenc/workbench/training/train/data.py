"""The data of a training, as fairseq reads it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from fairseq_posenc.errors import UserError


class Data(NamedTuple):
    """One data-bin, or the shards of one."""

    path: str  # of the folder, or of several, joined by colons
    name: str  # a word for it


def find_data(given: str) -> Data:
    """Find what a user named: a data-bin, several joined by colons, or a folder of shards.

    Raises:
        UserError: there is no such folder, or one that is no data-bin, not finished, or of another
            dictionary than the first; or shards are missing.
    """
    if ":" in given and Path(given).is_dir():
        raise UserError(f"{given}: fairseq splits names at ':'; rename the folder")
    folders = [Path(part) for part in given.split(":")]
    name = folders[0].parent.name if len(folders) > 1 else folders[0].absolute().name
    if shards := sorted(path for path in folders[0].glob("shard*") if path.is_dir()):
        folders = shards
    for folder in folders:
        _check(folder, folders[0])
        whole = folder.name.rpartition("-of-")[2]  # shard00-of-16 is one of 16
        if whole.isdigit() and int(whole) != len(folders):
            raise UserError(f"{folder} is one of {whole} shards, and {len(folders)} are given")
    return Data(":".join(map(str, folders)), name)


def _check(folder: Path, first: Path) -> None:
    if folder.suffix == ".partial":
        raise UserError(f"{folder} is not finished: start its preprocessing again")
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}")
    if not any(folder.glob("dict*.txt")):
        raise UserError(f"{folder} is no data-bin folder: it has no dict.txt")
    own, others = folder / "dict.txt", first / "dict.txt"
    if own.exists() and own.read_bytes() != others.read_bytes():
        raise UserError(f"{own} is not that of {first}: its numbers mean other tokens")
