"""Ends commands with an exit code, and one line about an error or an interruption.

Exit codes: 0 success, 1 a failed run, 2 wrong input, 130 an interruption, 141 no reader is left.
"""

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

from fairseq_posenc.checkpoints.faults import find_message
from fairseq_posenc.error_messages import choose_exit_code

STOPPED = 130  # what a shell reports after Ctrl-C
_NO_READER = 141  # what a shell reports for a program whose output nobody reads any more


def run_main(program: Callable[[], int | None]) -> int:
    """Run a program to its end and return its exit code.

    A user's mistake, Ctrl-C, ``kill`` and a closed terminal are printed as one line. When the
    reader of the output has gone, as with ``| head``, the program ends silently.
    """
    try:
        try:
            os.getcwd()  # raises in a deleted folder, where torch would end the process
            for number in (signal.SIGTERM, signal.SIGHUP):  # `kill` and a closed terminal
                if signal.getsignal(number) is signal.SIG_DFL:  # else ignored, as under `nohup`
                    signal.signal(number, signal.default_int_handler)  # so that cleanup runs
            return program() or 0
        finally:
            _flush(sys.stdout)
    except BrokenPipeError:
        with suppress(OSError):  # it may have no reader either
            _flush(sys.stderr)
        return _NO_READER
    except KeyboardInterrupt:
        line, code = "stopped; the same command continues, or starts again", STOPPED
    except Exception as error:
        if (message := find_message(error)) is None:  # a fault of ours: show the traceback
            raise
        line, code = f"error: {message}", choose_exit_code(error)
    print(f"fairseq-posenc: {line}", file=sys.stderr)
    return code


def _flush(stream: TextIO) -> None:
    """Flush an output here: Python's exit would report a full disk in its own words.

    Raises:
        OSError: the disk is full, or the reader has gone.
    """
    try:
        print(end="", file=stream, flush=True)  # does nothing without a standard output
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # the exit flushes too
        raise
