"""Output folders: locked for one run at a time, and, by :class:`WholeFolder`, complete or absent.

A run that resumes works in its folder under a lock (:func:`lock_output_folder`). Data and models
are made in ``NAME.partial``, which is renamed to ``NAME`` when it is complete, with a manifest that
holds the plan: everything that the content depends on.
"""

import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Optional

from fairseq_posenc import locks
from fairseq_posenc.errors import RunError, UserError
from fairseq_posenc.files import errors_that_name, sync, write_whole
from fairseq_posenc.workbench.running.exit_codes import signals_as_keyboard_interrupt
from fairseq_posenc.workbench.running.files import refuse_link
from fairseq_posenc.workbench.running.progress import say

MANIFEST = "manifest.json"  # in a complete folder: its plan, and facts about its content
_PROGRESS = "progress.json"  # in a partial folder: its plan, and the parts that are done
LOCK = ".fairseq-posenc"  # locked while a run works in the folder
_SECONDS_BETWEEN_SAVES = 10.0
_CHECKSUM = re.compile(r"[0-9a-f]{64}")  # SHA-256


@contextmanager
def lock_folder(folder: Path, prefix: str = "--out") -> Iterator[int]:
    """Lock a folder for one run; yield the open lock, which the run's programs inherit.

    A program that outlives the run keeps the lock, so no other run writes into the folder. On a
    file system without locks, a warning is printed instead.

    Args:
        folder: the folder; made if it does not exist.
        prefix: text before the folder in messages, such as the option that named it.

    Raises:
        UserError: the folder cannot be made or written to, or another process holds its lock.
    """

    def warn(reason: str) -> None:
        say(f"{folder}: cannot be locked ({reason}): do not start a second run there")

    name = f"{prefix} {folder}"
    # `locks.acquire` replaces {holder} by a description of the process that has the lock.
    refusal = f"{name}: {{holder}} is running there; wait until it ends, or name another folder"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = locks.acquire(folder / LOCK, refusal, warn)
    except OSError as error:
        raise UserError(f"{name}: {error.strerror}; name another folder") from None
    try:
        yield lock
    finally:
        locks.release(lock)


@contextmanager
def lock_output_folder(folder: Path, allowed: Collection[str] = ()) -> Iterator[int]:
    """Lock a folder of results; refuse one with other files, because steps may delete them.

    Args:
        folder: the folder; made if it does not exist.
        allowed: names of files that may lie there without a lock, such as results that are kept
            under version control.

    Raises:
        UserError: see :func:`lock_folder`; or the folder is a link, or holds other files.
    """
    refuse_link(folder)
    names = set(os.listdir(folder) if folder.is_dir() else ()) - set(allowed)
    if names and LOCK not in names:
        raise UserError(
            f"--out {folder}: holds other files ({min(names)}); name a new or empty folder"
        )
    with lock_folder(folder) as lock:
        yield lock


def make_folder(out: Path) -> None:
    """Make the folder of a command's results.

    Raises:
        UserError: the folder cannot be made, or is a link.
    """
    refuse_link(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out}: {error.strerror}; name another folder") from None


def is_locked(folder: Path) -> bool:
    """Check whether a run works in a folder; False on a file system without locks."""
    return locks.is_held(folder / LOCK)


class WholeFolder:
    """An output folder that is filled as ``NAME.partial`` and renamed when it is complete.

    A :class:`~fairseq_posenc.workbench.running.jobs.Step` replaces its folder when its inputs
    change; this class never replaces data.

    Args:
        path: the finished folder, as the user wrote it, for messages.
        plan: everything that the content depends on, as JSON values.
        plan_key: key of the plan in the manifest; ``request`` for translation data.
    """

    def __init__(self, path: Path, plan: dict[str, Any], plan_key: str = "plan") -> None:
        self.path = path
        self.plan = json.loads(json.dumps(plan))  # tuples become lists, as in the manifest
        self._plan_key = plan_key
        self._final = path.resolve()
        self.partial = _name_partial(self._final)
        self._last_save = time.monotonic()

    def check_done(self) -> bool:
        """Check whether the folder exists and was made from the same plan; print a line if so.

        Raises:
            UserError: it was made from another plan or by another program, or its name has a colon,
                at which fairseq would split it.
        """
        if ":" in str(self.path):
            raise UserError(
                f"--out {self.path}: fairseq splits names at ':'; name a folder without one"
            )
        if not self.path.exists():
            return False
        self._refuse_other_plan(read_plan(self.path, self._plan_key), self.path)
        say(f"{self.path} exists already, made from the same inputs with the same options")
        return True

    @contextmanager
    def resume(self) -> Iterator[dict[str, Any]]:
        """Lock the partial folder and yield the progress saved in it, ``{}`` at first.

        The plan is saved before anything else is written. A folder with another plan is refused if
        it has progress, and emptied if not. A UserError in the block deletes the folder, because
        only other input can mend it; a RunError keeps it.

        Raises:
            UserError: another process holds the lock, or another program or plan made the folder.
        """
        with lock_output_folder(self.partial):
            saved = read_json_object(self.partial / _PROGRESS) or {}
            progress = saved.get("done") or {}
            if progress:
                self._refuse_other_plan(saved.get("plan"), self.partial)
            elif saved.get("plan") != self.plan:
                self._empty()
                self.save({})
            try:
                yield progress
            except UserError as error:
                if not isinstance(error, RunError):
                    self.discard()
                raise

    @contextmanager
    def create(self) -> Iterator[int]:
        """Lock and empty the partial folder, and yield the open lock; an error deletes the folder.

        Raises:
            UserError: another process holds the lock, or another program made the folder.
        """
        # No advice: the same command would begin again.
        with signals_as_keyboard_interrupt(advice=""), lock_output_folder(self.partial) as lock:
            self._empty()
            try:
                yield lock
            except BaseException:
                self.discard()
                raise

    def save(self, progress: dict[str, Any]) -> None:
        """Save the progress that :meth:`resume` will yield, as JSON values."""
        _write_json(self.partial / _PROGRESS, {"plan": self.plan, "done": progress})
        self._last_save = time.monotonic()

    @property
    def is_save_due(self) -> bool:
        """Whether the last save was some seconds ago."""
        return time.monotonic() - self._last_save >= _SECONDS_BETWEEN_SAVES

    def discard(self) -> None:
        """Delete the partial folder."""
        with suppress(OSError):
            self._empty()
            (self.partial / LOCK).unlink()  # last, because it marks the folder as ours
            self.partial.rmdir()

    def finish(self, content: dict[str, Any]) -> None:
        """Write the manifest and publish the folder."""
        _write_json(self.partial / MANIFEST, {self._plan_key: self.plan, **content})
        self.publish()
        say(f"wrote {self.path}")

    def publish(self, replaces: bool = False) -> None:
        """Sync everything to disk, and rename the folder to its final name.

        With ``replaces``, a folder of this name is moved away first, and deleted last.
        """
        for path in (*self.partial.rglob("*"), self.partial):
            sync(path)
        old = None
        if replaces and self._final.exists():
            old = tempfile.mkdtemp(prefix=f"{self._final.name}.old-", dir=self._final.parent)
            os.rename(self._final, old)
        os.rename(self.partial, self._final)
        for name in (_PROGRESS, LOCK):  # they marked the partial folder as ours
            (self._final / name).unlink(missing_ok=True)
        sync(self._final.parent)
        if old is not None:
            shutil.rmtree(old)

    def _empty(self) -> None:
        """Delete the files of a killed run from the partial folder."""
        (self.partial / _PROGRESS).unlink(missing_ok=True)  # first: it must not outlive the files
        empty_folder(self.partial)

    def _refuse_other_plan(self, plan: Any, folder: Path) -> None:
        """Refuse a folder that was made from another plan, or without one."""
        if not isinstance(plan, dict):
            raise UserError(
                f"--out {folder}: exists, and was not made by this program; name another folder"
            )
        if differences := list_differences(plan, self.plan):
            raise UserError(
                f"--out {folder}: was made with other {'; other '.join(differences)}; name another "
                "folder, or delete that one"
            )


@contextmanager
def create_folder(folder: Path, replaces: bool = False) -> Iterator[Path]:
    """Yield a temporary folder to fill; rename it to ``folder`` when the block ends without error.

    Raises:
        UserError: the folder is a link, or exists and is not empty, without ``replaces``.
    """
    refuse_link(folder)
    holds_files = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    if holds_files and not replaces:
        raise UserError(f"--out {folder}: exists and is not empty; name another folder")
    output = WholeFolder(folder, {})
    with errors_that_name(folder), output.create():
        yield output.partial
        output.publish(replaces)


def empty_folder(folder: Path) -> None:
    """Delete everything in a folder except its lock."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name == LOCK:
            continue
        if path.is_symlink() or path.is_file():
            path.unlink()
        else:
            shutil.rmtree(path)


def _name_partial(whole: Path) -> Path:
    return whole.with_name(f"{whole.name}.partial")


def read_progress(folder: Path) -> Any:
    """Read the progress saved in a folder's partial folder; None without one."""
    return read_json_object(_name_partial(folder.resolve()) / _PROGRESS)


def read_plan(folder: Path, plan_key: str = "plan") -> Any:
    """Read the plan that a folder was made from; None if it has none."""
    return (read_json_object(folder / MANIFEST) or {}).get(plan_key)


def list_differences(old: Any, new: Any, name: str = "") -> list[str]:
    """Describe the differences of two plans; of a file with another checksum give only the name.

    For the values in plans, ``name`` has the keys that lead to them.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        differences: list[str] = []
        for key in dict.fromkeys([*new, *old]):
            inner_name = f"{name}, {key}".lstrip(", ")
            differences += list_differences(old.get(key), new.get(key), inner_name)
        return differences
    if old == new:
        return []
    if isinstance(old, list) and isinstance(new, list):  # such as the words of a command
        removed = [item for item in old if item not in new]
        added = [item for item in new if item not in old]
        if removed or added:  # else only their order or number differs
            old, new = removed, added
    values = f"{old}, not {new}"
    return [name if _CHECKSUM.search(values) else f"{name}: {values}"]


def read_json_object(path: Path) -> Optional[dict[str, Any]]:
    """Read a JSON object from a file; None if the file is missing or holds something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _write_json(path: Path, content: dict[str, Any]) -> None:
    write_whole(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
