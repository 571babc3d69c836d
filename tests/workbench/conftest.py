"""Small disks."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Yield a function that mounts an empty disk of a size, as in 16k; it is a folder."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount_folder(size: str) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"no disk can be mounted here: {done.stderr.strip()}")
        return folder

    yield mount_folder
    if folder.is_mount():
        subprocess.run(["umount", folder], check=True)
