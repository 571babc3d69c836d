"""The calls of fairseq's functions while they log or fail.

fairseq offers no hook where its commands have options, model and data together, but it logs there.
Files are named as in ``fairseq_cli/train.py``, whose module is ``__main__`` under ``python -m``.
"""

from __future__ import annotations

import os
import sys
import traceback
from types import FrameType


def find_call(file: str, function: str) -> FrameType | None:
    """Find the innermost call of a function that now runs."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_of(frame, file, function):
        frame = frame.f_back
    return frame


def passed_through(error: BaseException, file: str, function: str = "") -> bool:
    """Check whether an error passed through a function, or without one through any of a file."""
    return any(_is_of(frame, file, function) for frame, _ in traceback.walk_tb(error.__traceback__))


def _is_of(frame: FrameType, file: str, function: str) -> bool:
    code = frame.f_code
    parts = code.co_filename.split(os.sep)
    return function in ("", code.co_name) and "/".join(parts[-file.count("/") - 1 :]) == file
