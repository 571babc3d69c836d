"""Ends commands with an exit code and one line about an error; turns signals into interruptions.

Exit codes: 0 for success, 1 for a failed run, 2 for wrong input, 130 for an interruption.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Optional

from fairseq_posenc.checkpoints.faults import find_message
from fairseq_posenc.error_messages import choose_exit_code
from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.running.standard_streams import outlive_readers

STOPPED = 130  # what a shell reports after Ctrl-C


def run_main(program: Callable[[], Optional[int]]) -> int:
    """Run a program to its end and return its exit code.

    An error that ``find_message`` knows, and Ctrl-C, are printed as one line. When the reader of
    the output has gone, as with ``| head``, the work goes on; a command that only prints can ask
    ``standard_streams.has_reader``, and stop.
    """
    outlive_readers()
    try:
        try:
            _check_working_folder()
            return program() or 0
        finally:
            if sys.stdout:
                sys.stdout.flush()  # here, because Python's exit would hide a full disk
    except KeyboardInterrupt as interruption:
        line = "; ".join(["stopped", *interruption.args])
        code = STOPPED
    except Exception as error:
        if (message := find_message(error)) is None:
            raise
        line = f"error: {message}"
        code = choose_exit_code(error)
    print(f"fairseq-posenc: {line}", file=sys.stderr)
    return code


def _check_working_folder() -> None:
    try:
        os.getcwd()
    except FileNotFoundError:  # some libraries raise it as soon as they are imported
        raise UserError("the working folder has been deleted; change to another one") from None


@contextmanager
def signals_as_keyboard_interrupt(
    advice: str = "the same command continues from here",
) -> Iterator[None]:
    """Raise KeyboardInterrupt on ``kill`` and on a closed terminal too, so that cleanup runs.

    Signals that are ignored stay ignored, as under ``nohup``.

    Args:
        advice: how to continue, printed after "stopped" unless the interruption has a text; empty
            to leave it to an outer block.

    Raises:
        KeyboardInterrupt: with the advice, which the command line prints.
    """

    def interrupt(number: int, frame: Optional[FrameType]) -> None:
        raise KeyboardInterrupt

    numbers = (signal.SIGTERM, signal.SIGHUP)
    changed = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    for number in changed:
        signal.signal(number, interrupt)
    try:
        yield
    except KeyboardInterrupt as interruption:
        if interruption.args or not advice:
            raise
        raise KeyboardInterrupt(advice) from None
    finally:
        for number in changed:
            signal.signal(number, signal.SIG_DFL)
