"""Lines that tell how far a comparison is."""

from __future__ import annotations

import time
from typing import Callable

from fairseq_posenc.running.logs import Entry

_PAUSE = 4.0  # seconds between two lines, so that fast machines do not flood the screen


def say(text: str) -> None:
    """Print a line at once, also into a pipe."""
    print(text, flush=True)


class Progress:
    """Tells the state of the trainings and estimates the time left for all of them.

    Args:
        total: updates that are still to be made in all trainings.
        clock: returns seconds; replaced in tests.
    """

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._total = total
        self._clock = clock
        self._began = clock()
        self._done = 0  # updates made since then
        self._last_line = float("-inf")

    def start(self, label: str, updates: int, goal: int) -> None:
        """Begin, or go on with, one training.

        Args:
            label: what the lines call it.
            updates: updates that an earlier run has made.
            goal: updates to reach.
        """
        self._label, self._updates, self._goal = label, updates, goal
        self._validation = ""
        where = f"to continue at update {updates:,}" if updates else f"for {goal:,} updates"
        say(f"{label}: starting fairseq-train {where}")

    def show(self, entry: Entry) -> None:
        """Tell about one line of a training's log."""
        self._done += max(0, entry.updates - self._updates)
        self._updates = max(self._updates, entry.updates)
        if entry.kind == "valid":
            self._validation = f", validation {entry.perplexity:,.1f}"
            return
        now = self._clock()
        if now - self._last_line < _PAUSE and entry.updates < self._goal:
            return
        self._last_line = now
        say(
            f"{self._label}: update {entry.updates:,} of {self._goal:,}, perplexity: training "
            f"{entry.perplexity:,.1f}{self._validation}, {entry.speed:,.0f} tokens/s; "
            f"{format_time(self._left(now))} left in all"
        )

    def _left(self, now: float) -> float:
        # The start of each training counts, so the estimate includes those still to come.
        return (now - self._began) / max(1, self._done) * max(0, self._total - self._done)


def format_time(seconds: float) -> str:
    """Return a duration as people say it: ``45 s``, ``3 min 20 s``, ``2 h 5 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
