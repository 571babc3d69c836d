"""Folders of results: one lock each, whole or absent, and bound to the request that they answer.

A *request* is everything that a result depends on, as JSON values by name: settings, checksums,
the version. The same request finds the result; another one is refused with the differences.

A command that makes a whole folder, such as a data-bin::

    if not is_made(out, request):
        with whole_folder(out, request) as partial:  # OUT.partial, locked
            if not (partial / "train.bin").exists():  # finished before a kill
                with written_whole(partial / "train.bin") as new:
                    ...

A command whose folder grows by results, such as training runs with a JSON file each::

    with lock_folder(out) as lock:
        claim(out, request)  # what all results in the folder share
        if (figures := read_result(out / "cola.json", {"seed": 1})) is None:
            run_logged(command, log, lock)  # starts a program, which inherits the lock
            write_result(out / "cola.json", {"seed": 1}, figures)
"""

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fairseq_posenc import locks
from fairseq_posenc.errors import RunError, UserError, shortened
from fairseq_posenc.files import errors_that_name, sync, write_whole

Request = Mapping[str, Any]
Figures = dict[str, Any]  # results by name, as JSON values
REQUEST = "request.json"  # in a folder: the request that it answers
LOCK = ".fairseq-posenc"  # locked while a command works in the folder
_BLOCK = 1 << 20  # bytes that are read at a time
_ADVICE = "name another folder, or delete that one"


def checksum(path: Path) -> str:
    """Compute the SHA-256 checksum of a file; refuse a pipe, which gives its content only once."""
    if not path.is_file():
        raise UserError(f"{path}: is read twice: name a file, not a pipe")
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def lock_folder(folder: Path) -> Iterator[int]:
    """Lock a folder, created if missing, for one command; yield the lock, for programs to inherit.

    A program that outlives the command keeps the lock, so no other command writes into the folder,
    unless it is deleted: after an error, new folders without results are, also those above it.

    Raises:
        UserError: the folder is a link or cannot be made, or another process holds the lock.
    """
    _refuse_link(folder)
    new = [x for x in (folder, *folder.parents) if not x.exists()]  # the innermost first
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = locks.acquire(folder / LOCK, folder=str(folder))
    except OSError as error:
        _delete_unused(new)
        raise UserError(f"{folder}: {error.strerror}; name another folder") from None
    try:
        yield lock
    except BaseException:
        _delete_unused(new)
        raise
    finally:
        locks.release(lock)


def _delete_unused(folders: Sequence[Path]) -> None:
    """Delete folders that have at most a lock and a request, the innermost first."""
    for folder in folders:
        with suppress(OSError):  # it was not made, or another command writes into it
            if {path.name for path in folder.iterdir()} <= {LOCK, REQUEST}:
                (folder / REQUEST).unlink(missing_ok=True)
                (folder / LOCK).unlink(missing_ok=True)
                folder.rmdir()


def _refuse_link(folder: Path) -> None:
    if folder.is_symlink():  # it may lead elsewhere later, and no folder can be renamed to it
        target = folder.resolve()
        raise UserError(f"{folder}: is a link to {target}; name that folder itself, or another")


def claim(folder: Path, request: Request, has_results: bool = True) -> None:
    """Bind a locked folder to a request, unless it holds something finished for another one.

    The lock, the request and unfinished work (``*.partial``) do not count as finished; without
    results, all that was made for a request with the same keys is deleted.

    Raises:
        UserError: the folder holds results of another request, or files of another program.
    """
    names = {path.name for path in folder.iterdir() if not path.name.endswith(".partial")}
    # A killed command may also leave a part of the request, under a longer name.
    if finished := {name for name in names - {LOCK} if not name.startswith(REQUEST)}:
        if REQUEST not in names:
            raise UserError(f"{folder}: holds other files ({min(finished)}); name an empty folder")
        old = read_json(folder / REQUEST)
        if has_results or not isinstance(old, dict) or old.keys() != request.keys():
            return refuse_other(folder, old, request)
        empty(folder)
    write_whole(folder / REQUEST, _format(request))


def is_made(folder: Path, request: Request) -> bool:
    """Check whether :func:`whole_folder` made a folder for a request; refuse any other folder."""
    if not folder.exists():
        return False
    if not (folder / REQUEST).exists():  # it may be a file of the user's
        raise UserError(f"{folder}: exists, and was not made by this command; name another folder")
    refuse_other(folder, read_json(folder / REQUEST), request)
    return True


@contextmanager
def whole_folder(folder: Path, request: Request | None = None) -> Iterator[Path]:
    """Yield ``NAME.partial``, locked, to fill; at the end rename it to ``NAME``, with the request.

    What an interrupted command left there stays: files that exist are whole if they were written so
    (:func:`~fairseq_posenc.files.written_whole`). Without a request, the folder begins empty.

    Args:
        folder: the final folder.
        request: everything that its content depends on.

    Raises:
        UserError: the folder exists and is not empty, another process works on it, or another
            request was interrupted.
    """
    if folder.name in ("", ".."):  # `.` and `/` have none, and cannot be replaced
        raise UserError(f"{folder}: name a new folder")
    partial = folder.with_name(f"{folder.name}.partial")
    _refuse_link(folder)
    if partial.is_dir() and any(partial.iterdir()) and not (partial / LOCK).exists():
        raise UserError(f"{folder}: {partial} was not made by this command; delete it")
    with lock_folder(partial), errors_that_name(folder):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"{folder}: exists and is not empty; name another folder")
        if request is None:
            empty(partial)
        else:
            claim(partial, request)
        try:
            yield partial
        except BaseException as error:
            is_wrong_input = isinstance(error, UserError) and not isinstance(error, RunError)
            if request is None or is_wrong_input:  # nothing to continue from
                shutil.rmtree(partial)
            raise
        for path in (*partial.rglob("*"), partial):
            sync(path)
        partial.rename(folder)  # replaces an empty folder
        (folder / LOCK).unlink()
        sync(folder.parent)


def empty(folder: Path) -> None:
    """Delete everything in a folder except its lock."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != LOCK:
            path.unlink()


def read_result(path: Path, request: Request) -> Figures | None:
    """Read the figures that :func:`write_result` wrote for a request; None if there is no file.

    Raises:
        UserError: the file is damaged, or holds the result of another request.
    """
    if not path.exists():
        return None
    content = read_json(path)
    if not isinstance(content, dict) or not {"request", "figures"} <= content.keys():
        raise UserError(f"{path}: is not a result of this command; delete it, or name another")
    refuse_other(path, content["request"], request)
    return content["figures"]


def write_result(path: Path, request: Request, figures: Figures) -> None:
    """Write figures with the request that they answer, atomically."""
    write_whole(path, _format({"request": request, "figures": figures}))


def refuse_other(path: Path, old: Any, new: Request) -> None:
    """Refuse a file or folder that was made for another request; list the differences."""
    if not isinstance(old, dict) or old.keys() != new.keys():
        raise UserError(f"{path}: was made by another command or version; {_ADVICE}")
    # JSON has lists for tuples.
    if differences := list_differences(old, json.loads(json.dumps(new))):
        raise UserError(f"{path}: was made with other {'; other '.join(differences)}; {_ADVICE}")


def list_differences(old: Any, new: Any, name: str = "") -> list[str]:
    """Describe how requests differ: ``seed: 1, not 2``; of checksums (64 digits) only the names.

    Args:
        old: the first request, or a value in it.
        new: the second one.
        name: the keys that lead to these values, joined by commas.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        keys = dict.fromkeys([*new, *old])
        pairs = [(f"{name}, {key}".lstrip(", "), old.get(key), new.get(key)) for key in keys]
        return [text for place, was, now in pairs for text in list_differences(was, now, place)]
    if old == new:
        return []
    values = f"{shortened(str(old))}, not {shortened(str(new))}"
    is_checksum = any(isinstance(value, str) and len(value) == 64 for value in (old, new))
    return [name if is_checksum else f"{name}: {values}"]


def _format(content: Request) -> str:
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def json_values(content: Any) -> Any:
    """Copy content for JSON, which has no NaN and no infinity: None in their place."""
    return json.loads(json.dumps(content), parse_constant=lambda constant: None)


def read_json(path: Path) -> Any:
    """Read a JSON file that a command wrote in order to continue from it; refuse a damaged one."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = shortened(" ".join(str(error).split()))
        raise UserError(f"{path}: cannot be read ({reason}); delete it, or name another") from None
