"""The data-bin directory: whole or not there at all, with a manifest of what is in it."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fairseq_posenc.errors import UserError

_MANIFEST, _PROGRESS, _LOCK = "manifest.json", "progress.json", "lock"


class Folder:
    """A directory that is filled under another name, and gets its own when it is whole.

    Args:
        path: what it is to be called.
        plan: everything that its content depends on, as JSON can hold it.
    """

    def __init__(self, path: Path, plan: dict[str, Any]) -> None:
        self.path, self._plan = path, json.loads(json.dumps(plan))
        self.partial = path.with_name(path.name + ".partial")

    def is_done(self) -> bool:
        """Return whether the directory is there already, made from the same plan.

        Raises:
            UserError: it was made otherwise, or by another program.
        """
        if not self.path.exists():
            return False
        saved = _read(self.path / _MANIFEST) or {}
        self._compare(saved.get("plan"), self.path)
        return True

    @contextmanager
    def open(self) -> Iterator[dict[str, Any]]:
        """Enter the unfinished directory, alone; yields what was saved in it, ``{}`` at first.

        Raises:
            UserError: another process works there, or it was begun with another plan.
        """
        self.partial.mkdir(parents=True, exist_ok=True)
        with open(self.partial / _LOCK, "w") as lock:
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not inherited by the workers
            except OSError:
                raise UserError(f"another process is writing {self.partial}; wait for it") from None
            saved = _read(self.partial / _PROGRESS)
            if saved is not None:
                self._compare(saved["plan"], self.partial)
            yield saved["done"] if saved else {}

    def save(self, done: dict[str, Any]) -> None:
        """Save what is done, so that :meth:`open` yields it."""
        _write(self.partial / _PROGRESS, {"plan": self._plan, "done": done})

    def discard(self) -> None:
        """Delete the unfinished directory."""
        shutil.rmtree(self.partial)

    def finish(self, content: dict[str, Any]) -> None:
        """Write the manifest and give the directory its name."""
        _write(self.partial / _MANIFEST, {"plan": self._plan, **content})
        (self.partial / _PROGRESS).unlink(missing_ok=True)
        (self.partial / _LOCK).unlink()
        _sync(self.partial)
        os.rename(self.partial, self.path)
        _sync(self.path.parent)

    def _compare(self, plan: Any, where: Path) -> None:
        if plan == self._plan:
            return
        old = plan if isinstance(plan, dict) else {}
        names = [name for name in self._plan if old.get(name) != self._plan[name]]
        raise UserError(
            f"{where} is there already, made from something else (different: "
            f"{', '.join(names) or 'the plan'}); delete it, or choose another --out"
        )


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def _write(path: Path, content: dict[str, Any]) -> None:
    temporary = path.with_suffix(".new")
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _sync(directory: Path) -> None:
    """Bring the names in a directory to the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
