"""Finds calls of fairseq's functions on the stack, to read their local variables.

fairseq has no hook at the point where a command has its options, model and data, but it logs a
message there, and a log filter can look up the stack. Functions are identified by file, such as
``fairseq_cli/train.py``, because under ``python -m`` this module's name is ``__main__``.
"""

import os
import sys
import traceback
from types import FrameType


def find_call(file: str, function: str) -> FrameType | None:
    """Find the innermost running call of a function; None if it does not run."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_of(frame, file, function):
        frame = frame.f_back
    return frame


def passed_through(error: BaseException, file: str, function: str = "") -> bool:
    """Check whether an error passed through a function, or if none is named, through a file."""
    return any(_is_of(frame, file, function) for frame, _ in traceback.walk_tb(error.__traceback__))


def _is_of(frame: FrameType, file: str, function: str) -> bool:
    """Check whether a frame is a call of a function (any if empty) in a file, a relative path."""
    code = frame.f_code
    parts = code.co_filename.split(os.sep)
    return function in ("", code.co_name) and "/".join(parts[-file.count("/") - 1 :]) == file
