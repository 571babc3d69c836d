"""Checks, by an audit hook, every setting that fairseq evaluates and every checkpoint it opens.

Python calls audit hooks before it compiles, runs or opens anything, and an exception in a hook
cancels the operation. So fairseq is not patched, and no path through its code is missed. The hook
stays for the rest of the process; ``host/startup.py`` adds it when fairseq loads the plugin.
"""

import os
import sys
from pathlib import Path
from types import CodeType
from typing import Any

from fairseq_posenc.checkpoints.safe_loading import open_checkpoint
from fairseq_posenc.checkpoints.trusted_settings import is_literal, refuse_files
from fairseq_posenc.errors import UserError, shortened

_OPENER = "load_checkpoint_to_cpu"  # fairseq's function that opens all of its checkpoints


def check_fairseq(event: str, arguments: tuple[Any, ...]) -> None:
    """Refuse to run a setting as code, or to open an unsafe checkpoint, as an audit hook.

    Args:
        event: Python's name of what is about to happen.
        arguments: first the source for ``compile``, the code for ``exec``, the path for ``open``.
    """
    if event not in ("compile", "exec", "open"):
        return
    caller = sys._getframe(1)  # an audit hook's caller is the code that triggered the event
    if not str(caller.f_globals.get("__name__")).startswith("fairseq."):
        return
    if event == "compile":
        _refuse_source(arguments[0])
    elif event == "exec":
        _refuse_code(arguments[0])
    elif caller.f_code.co_name == _OPENER:
        refuse_unsafe_checkpoint(Path(os.fsdecode(arguments[0])))


def _refuse_source(source: Any) -> None:
    """Refuse the source that Python is about to compile unless it is a literal.

    Python passes the text of ``eval`` as UTF-8 bytes; :func:`is_literal` refuses texts that declare
    another encoding. Settings from a file are never syntax trees or of a subclass of ``str``, so
    these are refused, too.
    """
    # Where there is no text to check, a description is refused and quoted: it is not a literal.
    if type(source) is bytes:
        try:
            text = source.decode("utf-8")
        except UnicodeDecodeError:
            text = "bytes that are not UTF-8"
    elif type(source) is str:
        text = source
    else:
        text = f"something of the type {type(source).__name__}"
    if not is_literal(text):
        raise UserError(
            "a setting that fairseq evaluates is not a literal (numbers, words, lists of them), "
            f"and would be run as code: {shortened(' '.join(text.split()))!r}"
        )


def _refuse_code(code: Any) -> None:
    """Refuse a code object that refers to any name; the code of a literal refers to none."""
    if not isinstance(code, CodeType) or code.co_names or not _is_plain(code.co_consts):
        raise UserError(
            "a setting that fairseq evaluates is compiled code: use a file from a source you trust"
        )


def _is_plain(value: Any) -> bool:
    """Check whether a constant is a number, a text, None, or a tuple or set of these."""
    if type(value) in (tuple, frozenset):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, complex, str, bytes)


def refuse_unsafe_checkpoint(path: Path) -> None:
    """Refuse a checkpoint that is damaged, would run code, or names files to open.

    Its tensors are read once, for their checksums, and not kept in memory. A missing file is left
    to fairseq, which reports it.
    """
    if path.is_file():
        with open_checkpoint(path, for_weights=True) as state:
            refuse_files(state)
