"""How our programs end: their exit code, and a line on standard error for what went wrong.

0 is for success, 1 for a run that failed, 2 for a mistake of the user's, 130 for an interruption.
"""

from __future__ import annotations

import os
import sys
from typing import Callable, Optional

from fairseq_posenc.errors import exit_code, one_line
from fairseq_posenc.running.interruption import STOPPED


def ended(program: Callable[[], Optional[int]]) -> int:
    """Run a program to its end and return its exit code.

    An error that a line tells (:func:`~fairseq_posenc.errors.one_line`) is told so. If whoever
    reads the output has enough, as ``head`` has at some time, the program ends quietly. Ctrl-C is a
    line too, whatever it interrupts; what has to be cleaned up is by then.
    """
    try:
        try:
            return _told(program)
        finally:
            sys.stdout.flush()  # at Python's exit it would be too late to notice
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt as interruption:
        print(
            f"fairseq-posenc: {'; '.join(['stopped', *filter(None, interruption.args)])}",
            file=sys.stderr,
        )
        return STOPPED


def _told(program: Callable[[], Optional[int]]) -> int:
    try:
        return program() or 0
    except Exception as error:
        message = one_line(error)
        if message is None:
            raise
        print(f"fairseq-posenc: error: {message}", file=sys.stderr)
        return exit_code(error)
