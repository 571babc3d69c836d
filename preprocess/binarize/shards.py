"""Divides files among shards, and checks that shards together have all of the text once."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.running.files import checksum
from fairseq_posenc.workbench.running.folders import MANIFEST, list_differences, read_json_object
from fairseq_posenc.workbench.tokens.files import SEQUENTIAL

_BLOCK_BYTES = 1 << 20
_HOW_TO_REMAKE = "and start the same command again, which makes only this shard"


class Part(NamedTuple):
    """Whole lines of a file, from byte ``start`` to ``end``; compressed files are never divided."""

    path: str
    start: int
    end: int


class Input(NamedTuple):
    """A part with the checksum of its content, which identifies the text wherever the file is."""

    part: Part
    sha256: str = ""  # empty: the content is not checked

    @classmethod
    def from_part(cls, part: Part) -> Input:
        """Compute the checksum of a part, by reading it."""
        return cls(part, checksum(Path(part.path), part.start, part.end))


def combine_checksums(inputs: Sequence[Input]) -> str:
    """Combine the checksums of several parts to one."""
    return hashlib.sha256(" ".join(entry.sha256 for entry in inputs).encode()).hexdigest()


def describe_file(path: Path) -> dict[str, Any]:
    """Describe a written file for a manifest, by its size and checksum."""
    return {"bytes": path.stat().st_size, "sha256": checksum(path)}


def find_files(inputs: Sequence[str]) -> list[str]:
    """List the input files; for a folder all files below it, sorted by path.

    Hidden files and folders, in which download programs keep their records, are left out.

    Raises:
        UserError: a path is missing, or all files are empty.
    """
    files: list[str] = []
    for name in inputs:
        path = Path(name)
        if path.is_dir():
            below = (file for file in path.rglob("*") if file.is_file())
            visible = (
                file for file in below if "/." not in f"/{file.relative_to(path).as_posix()}"
            )
            files += sorted(map(str, visible))
        elif path.is_file():
            files.append(name)
        else:
            raise UserError(f"{name} is not there; give local files or directories")
    if not any(os.path.getsize(path) for path in files):
        raise UserError(f"no text in {', '.join(inputs)}")
    return files


def parts_of_shard(files: Sequence[str], shard: int, num_shards: int) -> list[Part]:
    """List the parts of a shard, in order.

    Shards have about the same number of bytes, or of files, if all files are compressed.

    Raises:
        UserError: the shard would be empty.
    """
    compressed = {path for path in files if Path(path).suffix in SEQUENTIAL}
    if len(compressed) < len(set(files)):
        weights = list(map(os.path.getsize, files))
    else:
        weights = [1] * len(files)
    # The shard has the weight from `begin` to `end`, and the compressed files that begin there.
    begin = sum(weights) * shard // num_shards
    end = sum(weights) * (shard + 1) // num_shards
    parts = []
    file_begin = 0  # weight of the files before this one
    for path, weight in zip(files, weights):
        if path in compressed:
            is_ours = begin <= file_begin < end
            part = Part(path, 0, os.path.getsize(path) if is_ours else 0)
        else:
            offsets = (begin - file_begin, end - file_begin)
            part = Part(path, *(_find_line_start(path, offset, weight) for offset in offsets))
        if part.start < part.end:
            parts.append(part)
        file_begin += weight
    if not parts:
        raise UserError(
            f"shard {shard} of {num_shards} would be empty: lines and compressed files are not "
            "divided; use fewer shards"
        )
    return parts


def _find_line_start(path: str, offset: int, size: int) -> int:
    """Find the beginning of the first line at or after an offset, which may be out of the file."""
    if not 0 < offset < size:  # without opening it: of many files for many shards it takes hours
        return min(max(offset, 0), size)
    with open(path, "rb") as file:
        file.seek(offset - 1)
        while (line := file.readline(_BLOCK_BYTES)) and not line.endswith(b"\n"):
            continue
        return file.tell()


def read_shards(folders: Sequence[Path], plan: dict[str, Any]) -> list[list[Input]]:
    """Read which parts of the training text are in each shard.

    Args:
        folders: folders of the shards.
        plan: plan of any shard; plans differ only in the shard's number and parts of the text.

    Raises:
        UserError: a shard is missing, damaged, or was made with other settings.
    """
    shards = []
    for folder in folders:
        manifest = read_json_object(folder / MANIFEST)
        if manifest is None:
            raise UserError(f"{folder} is missing or has no manifest; delete it, {_HOW_TO_REMAKE}")
        try:
            parts, differences = _compare_shard(folder, manifest, plan)
        except (KeyError, TypeError, AttributeError):
            problem = "was not made by this program"
            raise UserError(f"{folder}: {problem}; delete it, {_HOW_TO_REMAKE}") from None
        if differences:
            listed = "; other ".join(differences)
            raise UserError(f"{folder}: has other {listed}; delete it, {_HOW_TO_REMAKE}")
        shards.append(parts)
    return shards


def _compare_shard(
    folder: Path, manifest: dict[str, Any], plan: dict[str, Any]
) -> tuple[list[Input], list[str]]:
    """Read the parts of a shard; name what differs from the plan, its number and its manifest."""
    parts = [
        Input(Part(entry["path"], entry["start"], entry["end"]), entry["sha256"])
        for entry in manifest["splits"]["train"]["inputs"]
    ]
    shard_plan = manifest["plan"]
    differences = list_differences(_drop_shard(shard_plan), _drop_shard(plan))
    number = int(folder.name.removeprefix("shard").split("-")[0])
    recorded = (shard_plan["options"]["shard"], shard_plan["inputs"]["train"])
    # Another shard that was given this name, or a manifest that was edited.
    if recorded != (number, combine_checksums(parts)):
        differences.append("parts of the text")
    for split in manifest["splits"].values():
        for name, output in split.get("outputs", {}).items():
            path = folder / name
            if not path.exists() or path.stat().st_size != output["bytes"]:
                differences.append(f"content of {name}")
    return parts, differences


def check_coverage(shards: Sequence[Sequence[Input]], files: Sequence[str]) -> None:
    """Check that the parts of all shards, in order, are all files from beginning to end.

    Raises:
        UserError: bytes are in no shard, or in two.
    """
    parts = [entry.part for shard in shards for entry in shard]
    for path in files:
        reached = 0
        size = os.path.getsize(path)
        while reached < size:
            _, start, end = parts.pop(0) if parts else (path, size, size)
            if start != reached or end > size:
                raise UserError(
                    f"{path}: bytes {reached:,} to {start:,} are in no shard or in two: it changed "
                    "since they were made; delete the shards, and start the same command again"
                )
            reached = end
    if parts:
        raise UserError(f"{parts[0].path} is in a shard, but not in --train; delete the shards")


def _drop_shard(plan: dict[str, Any]) -> dict[str, Any]:
    """Remove the entries of a plan that differ between shards."""
    options = {name: value for name, value in plan["options"].items() if name != "shard"}
    return {**plan, "options": options, "inputs": None}
