"""Checks by their manifests that shards together contain all of the training text once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.running.folders import MANIFEST, list_differences, read_object

from .sources import Input, Part, combine_checksums

_AGAIN = "and start the same command again, which makes only this shard"


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
        manifest = read_object(folder / MANIFEST)
        if manifest is None:
            raise UserError(f"{folder} is missing or has no manifest; delete it, {_AGAIN}")
        parts = [
            Input(Part(entry["path"], entry["start"], entry["end"]), entry["sha256"])
            for entry in manifest["splits"]["train"]["inputs"]
        ]
        shard_plan = manifest["plan"]
        differences = list_differences(_drop_shard(shard_plan), _drop_shard(plan))
        number = int(folder.name.removeprefix("shard").split("-")[0])
        recorded = (shard_plan["options"]["shard"], shard_plan["inputs"]["train"])
        if recorded != (number, combine_checksums(parts)):
            differences.append("parts of the text")
        for split in manifest["splits"].values():
            for name, output in split.get("outputs", {}).items():
                path = folder / name
                if not path.exists() or path.stat().st_size != output["bytes"]:
                    differences.append(f"content of {name}")
        if differences:
            listed = "; other ".join(differences)
            raise UserError(f"{folder}: has other {listed}; delete it, {_AGAIN}")
        shards.append(parts)
    return shards


def check_coverage(shards: Sequence[Sequence[Input]], files: Sequence[str]) -> None:
    """Check that the parts of all shards, in order, are all files from beginning to end.

    Raises:
        UserError: bytes are in no shard, or in two.
    """
    parts = [entry.part for shard in shards for entry in shard]
    for path in files:
        reached, size = 0, os.path.getsize(path)
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
