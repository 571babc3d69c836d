"""Follows a running comparison: rewrites the report as a live page, and estimates the time left."""

from __future__ import annotations

import os
import sys
import time
import webbrowser
from collections.abc import Callable
from statistics import fmean
from typing import Optional

from fairseq_posenc.workbench.experiments.compare.report import PAGE, write_report
from fairseq_posenc.workbench.experiments.text_experiment import TextResults
from fairseq_posenc.workbench.running.progress import format_time, say

_OVERHEAD = 20.0  # seconds of a training that fairseq does not count, with five on two cores
_EVERY = 20.0  # seconds between two reports; drawing takes one or two


class Live:
    """Rewrites the report while trainings go on, and opens the first one in a browser if asked.

    Prints the time left once, after the first finished training.
    """

    def __init__(self, opens: bool) -> None:
        self._opens = opens
        self._next = time.monotonic() + _EVERY
        self._has_estimate = False

    def __call__(self, read: Callable[[], TextResults]) -> None:
        """Write the report with the results so far, unless the last one is recent."""
        if time.monotonic() < self._next:
            return
        results = read()
        if results.outcomes or any(curve.entries for curve in results.begun.values()):
            seconds = estimate_seconds_left(results)
            path = write_report(results, seconds).with_name(PAGE)
            if seconds and not self._has_estimate:
                say(f"{len(results.missing)} trainings left: about {format_time(seconds)}")
                self._has_estimate = True
            if self._opens:
                say(f"page of the run: {path}")
                open_in_browser(path.resolve().as_uri())
            self._opens = False
        self._next = time.monotonic() + _EVERY


def open_in_browser(address: str) -> None:
    """Open a page in the user's browser, unless there is no screen."""
    if sys.platform == "darwin" or {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys():
        webbrowser.open(address)


def estimate_seconds_left(results: TextResults) -> Optional[float]:
    """Estimate the time for the missing trainings; None before the first one is finished."""
    experiment, missing = results.experiment, results.missing
    durations = [outcome.seconds for outcome in results.outcomes if not outcome.diverged]
    if not durations or not missing:
        return None
    updates = [curve.entries[-1].updates for curve in results.begun.values() if curve.entries]
    trainings = len(missing) - sum(updates) / experiment.updates
    return trainings * (fmean(durations) + _OVERHEAD) / min(experiment.jobs, len(missing))
