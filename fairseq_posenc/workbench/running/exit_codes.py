"""Ends commands with an exit code and one line about an error; turns signals into interruptions.

Exit codes: 0 for success, 1 for a failed run, 2 for wrong input, 130 for an interruption.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fairseq_posenc.checkpoints.faults import find_message
from fairseq_posenc.error_messages import choose_exit_code
from fairseq_posenc.errors import UserError

STOPPED = 130  # what a shell reports after Ctrl-C
_NO_READER = 141  # what a shell reports of a program whose output nobody reads any more


def run_main(program: Callable[[], int | None]) -> int:
    """Run a program to its end and return its exit code.

    A user's mistake, and Ctrl-C, are printed as one line. When the reader of the output has gone,
    as with ``| head``, the program ends without a word.
    """
    try:
        try:
            _check_working_folder()
            return program() or 0
        finally:
            _flush_output()
    except BrokenPipeError:
        return _NO_READER
    except KeyboardInterrupt as interruption:
        line = "; ".join(["stopped", *interruption.args])  # how to continue
        code = STOPPED
    except Exception as error:
        if (message := find_message(error)) is None:  # a fault of ours: show the traceback
            raise
        line = f"error: {message}"
        code = choose_exit_code(error)
    print(f"fairseq-posenc: {line}", file=sys.stderr)
    return code


def _flush_output() -> None:
    """Flush standard output here, because Python's exit would hide that the disk is full.

    Raises:
        OSError: the disk is full, or the reader has gone.
    """
    try:
        if sys.stdout:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the exit flushes too
        raise


def _check_working_folder() -> None:
    try:
        os.getcwd()
    except FileNotFoundError:  # some libraries raise it as soon as they are imported
        raise UserError("the working folder has been deleted; change to another one") from None


@contextmanager
def signals_as_keyboard_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt on ``kill`` and on a closed terminal too, so that cleanup runs.

    Signals that are ignored stay ignored, as under ``nohup``.

    Raises:
        KeyboardInterrupt: with advice how to continue, which the command line prints.
    """
    numbers = (signal.SIGTERM, signal.SIGHUP)
    changed = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    for number in changed:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt("the same command continues from here") from None
    finally:
        for number in changed:
            signal.signal(number, signal.SIG_DFL)
