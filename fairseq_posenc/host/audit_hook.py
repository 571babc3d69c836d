"""Checks, by an audit hook, every setting that fairseq evaluates and every checkpoint it opens.

Python calls audit hooks before it compiles, runs or opens anything, and an exception in a hook
cancels the operation. So fairseq is not patched, and no path through its code is missed.
"""

import os
import sys
from pathlib import Path
from types import CodeType
from typing import Any

from fairseq_posenc.checkpoints.safe_loading import open_checkpoint
from fairseq_posenc.checkpoints.trusted_settings import is_literal, refuse_files
from fairseq_posenc.errors import UserError, shortened

_READER = "load_checkpoint_to_cpu"  # opens the checkpoints of all of fairseq's commands


def check_fairseq(event: str, arguments: tuple[Any, ...]) -> None:
    """Refuse to run a setting as code, or to read a broken checkpoint; an audit hook."""
    if event not in ("compile", "exec", "open"):
        return
    caller = sys._getframe(1)
    if not str(caller.f_globals.get("__name__")).startswith("fairseq."):
        return
    if event == "compile":
        _refuse_source(arguments[0])
    elif event == "exec":
        _refuse_code(arguments[0])
    elif caller.f_code.co_name == _READER:
        refuse_unsafe_checkpoint(Path(os.fsdecode(arguments[0])))


def _refuse_source(source: Any) -> None:
    """Refuse the source that Python is about to compile unless it is a literal.

    A hook gets the text of ``eval`` as UTF-8 bytes. Bytes that declare another encoding are refused
    by :func:`is_literal`. Syntax trees and subclasses of ``str``, which settings from a file never
    are, are refused, too.
    """
    if type(source) is bytes:
        try:
            source = source.decode("utf-8")
        except UnicodeDecodeError:
            source = "bytes that are not UTF-8"
    elif type(source) is not str:
        source = f"something of the type {type(source).__name__}"
    if not is_literal(source):
        raise UserError(
            "a setting that fairseq evaluates is not a literal (numbers, words, lists of them), "
            f"and would be run as code: {shortened(' '.join(source.split()))!r}"
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

    Its tensors are read once, for their checksums, and not kept in memory.
    """
    if path.is_file():
        with open_checkpoint(path, for_weights=True) as state:
            refuse_files(state)
