"""Exit codes, a line on standard error for an error, and signals as interruptions.

0 is for success, 1 for a run that failed, 2 for a mistake of the user's, 130 for an interruption.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Optional

from fairseq_posenc.checkpoints.error_messages import choose_exit_code, find_message
from fairseq_posenc.errors import UserError

STOPPED = 130  # what a shell reports after Ctrl-C
_closed: set[int] = set()  # standard streams that nobody reads any more


def run_main(program: Callable[[], Optional[int]]) -> int:
    """Run a program to its end and return its exit code.

    An error that ``find_message`` knows is printed as a line. Where nobody
    reads the output any more, as behind ``head``, the work goes on without it; a command that does
    nothing but print can ask :func:`has_reader`. Ctrl-C is a line too, whatever it interrupts; what
    has to be cleaned up is by then.
    """
    _outlive_readers()
    try:
        return _run_reporting_choose_error_handler(program)
    except KeyboardInterrupt as interruption:
        print(
            f"fairseq-posenc: {'; '.join(['stopped', *filter(None, interruption.args)])}",
            file=sys.stderr,
        )
        return STOPPED


def has_reader() -> bool:
    """Whether the standard output may still have a reader."""
    return sys.__stdout__ is None or sys.__stdout__.fileno() not in _closed


class _Output(io.FileIO):
    """A standard stream that drops what is written once it cannot be written any more.

    The reader of a pipe that closes it has enough; all else, as a full disk, is an error once.
    """

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())  # for programs that are started later as well
            os.close(nowhere)
            _closed.add(self.fileno())
            if not isinstance(error, BrokenPipeError):
                raise
            return len(data)


def _outlive_readers() -> None:
    """Let the standard streams of this process outlive their readers."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and stream is getattr(sys, f"__{name}__"):
            stream.flush()
            raw = _Output(stream.fileno(), "w", closefd=False)
            new = io.TextIOWrapper(
                io.BufferedWriter(raw),
                encoding=stream.encoding,
                errors=_choose_error_handler(stream),
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            )
            setattr(sys, name, new)


def _choose_error_handler(stream: Any) -> str:
    """Choose how to write text that cannot be encoded, as file names that are not UTF-8."""
    is_utf8 = stream.encoding.lower().startswith("utf")
    return "backslashreplace" if is_utf8 and stream.errors == "strict" else str(stream.errors)


def _run_reporting_choose_error_handler(program: Callable[[], Optional[int]]) -> int:
    try:
        try:
            _check_working_folder()
            return program() or 0
        finally:
            if sys.stdout:
                sys.stdout.flush()  # at Python's exit nobody would hear of a full disk
    except Exception as error:
        message = find_message(error)
        if message is None:
            raise
        print(f"fairseq-posenc: error: {message}", file=sys.stderr)
        return choose_exit_code(error)


def _check_working_folder() -> None:
    try:
        os.getcwd()
    except FileNotFoundError:  # which libraries end with as soon as they are imported
        raise UserError("the working folder has been deleted; change to another one") from None


class Ended(KeyboardInterrupt):
    """``kill``, or a closed terminal; Ctrl-C is not of this class."""


@contextmanager
def signals_as_keyboard_interrupt(
    advice: str = "the same command continues from here",
) -> Iterator[None]:
    """Raise KeyboardInterrupt on ``kill`` and a closed terminal too, so that cleaning up runs.

    Signals that are ignored stay so: that is what ``nohup`` is for.

    Args:
        advice: how to continue, printed after "stopped" unless the interruption has a text.

    Raises:
        KeyboardInterrupt: with the advice, which the command line prints.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Ended

    ends = (signal.SIGTERM, signal.SIGHUP)
    changed = [number for number in ends if signal.getsignal(number) is signal.SIG_DFL]
    for number in changed:
        signal.signal(number, interrupt)
    try:
        yield
    except KeyboardInterrupt as interruption:
        raise KeyboardInterrupt(*(interruption.args or [advice])) from None
    finally:
        for number in changed:
            signal.signal(number, signal.SIG_DFL)
