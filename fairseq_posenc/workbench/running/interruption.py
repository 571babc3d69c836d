"""Ctrl-C, ``kill`` and a closed terminal, all taken as the same wish."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOPPED = 130  # what a shell reports after Ctrl-C
CONTINUES = "the same command continues from here"


class Ended(KeyboardInterrupt):
    """``kill``, or a closed terminal; Ctrl-C is not of this class."""


@contextmanager
def signals_as_keyboard_interrupt(advice: str = "") -> Iterator[None]:
    """Raise KeyboardInterrupt on them, so that what was started is ended as well.

    Signals that are ignored stay so: that is what ``nohup`` is for.

    Args:
        advice: what the interruption says, behind "stopped", unless it says something itself; how
            to go on.

    Raises:
        KeyboardInterrupt: with the advice; the command line tells it, in a line.
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
