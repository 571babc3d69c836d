"""A folder that is there as a whole or not at all, and knows what it was made from."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Optional

from fairseq_posenc.errors import UserError

MANIFEST = "manifest.json"


def is_made(folder: Path, request: dict[str, Any]) -> bool:
    """Return whether a folder holds the result of a request.

    Args:
        folder: the folder.
        request: all that the result depends on, as JSON values.

    Raises:
        UserError: it holds something else.
    """
    if not folder.exists():
        return False
    try:
        made = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["request"]
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(
            f"--out {folder}: exists, and was not made by this program; name another folder"
        ) from None
    for part, values in request.items():
        names = dict.fromkeys([*values, *made.get(part, {})])
        for name in names:
            before, now = made.get(part, {}).get(name), values.get(name)
            if before != now:
                raise UserError(
                    f"--out {folder}: was made with other {part}, {name}: {before}, not {now}; "
                    "name another folder, or delete that one"
                )
    return True


@contextlib.contextmanager
def written_whole(folder: Path) -> Iterator[tuple[Path, int]]:
    """Yield a folder to write to, which gets its name at the end, and its open lock.

    Until then it is beside its place, as ``.NAME.unfinished``. It is removed if anything goes
    wrong; what a killed run left is removed by the next one.

    Raises:
        UserError: it cannot be made, or another run is making it.
    """
    work = folder.resolve().with_name(f".{folder.resolve().name}.unfinished")
    if "," in str(work):
        raise UserError(f"--out {folder}: fairseq-preprocess cannot have commas in names")
    try:
        work.mkdir(parents=True, exist_ok=True)
        lock = os.open(work, os.O_RDONLY)
    except OSError as error:
        raise UserError(f"--out {folder}: {error.strerror}; name another folder") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise UserError(f"--out {folder}: another run is making it; wait for its end") from None
    try:
        with _stoppable():
            for left in work.iterdir():
                shutil.rmtree(left) if left.is_dir() else left.unlink()
            yield work, lock
            work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
        os.close(lock)


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """Take ``kill`` and Ctrl-C as an exit, so that everything is cleared away first."""

    def stop(number: int, frame: Optional[FrameType]) -> None:
        sys.exit(128 + number)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
