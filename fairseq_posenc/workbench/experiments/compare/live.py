"""The report while the trainings go on: how long they take, and a page that follows them."""

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
from fairseq_posenc.workbench.experiments.text_settings import TextSettings
from fairseq_posenc.workbench.running.devices import choose_device, cores
from fairseq_posenc.workbench.running.progress import format_time, say

# Of a default model on one core, as in docs/results/demo.json; programs take seconds to start.
_TOKENS_PER_SECOND = 19_000
_OVERHEAD = 20.0  # seconds of a training that are no updates
_EVERY = 20.0  # seconds between two reports; drawing takes one or two


class Live:
    """Rewrites the report while trainings go on; shows it in a browser as soon as there is one."""

    def __init__(self, opens: bool) -> None:
        self._opens = opens
        self._next = time.monotonic() + _EVERY

    def __call__(self, read: Callable[[], TextResults]) -> None:
        """Write what there is, unless it was written a moment ago."""
        if time.monotonic() < self._next:
            return
        results = read()
        if results.outcomes or any(curve.entries for curve in results.begun.values()):
            path = write_report(results, seconds_left(results)).with_name(PAGE)
            if self._opens:
                say(f"the page of the run, which goes on: {path}")
                show(path.resolve().as_uri())
            self._opens = False
        self._next = time.monotonic() + _EVERY


def show(address: str) -> None:
    """Open a page in the user's browser, where there is a screen for one."""
    if sys.platform == "darwin" or {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys():
        webbrowser.open(address)


def seconds_left(results: TextResults) -> Optional[float]:
    """Estimate how long the missing trainings take; None where that is unknown."""
    settings, missing = results.settings, results.missing
    known = [each.seconds for each in results.outcomes if not each.diverged]
    each = fmean(known) if known else _expected(settings)
    if each is None or not missing:
        return None
    done = [curve.entries[-1].updates for curve in results.begun.values() if curve.entries]
    parts = len(missing) - sum(done) / settings.updates
    return parts * (each + _OVERHEAD) / min(settings.jobs, len(missing))


def _expected(settings: TextSettings) -> Optional[float]:
    """Estimate the seconds of one training before any was made: of the default sizes, on cores."""
    if settings.train_args or choose_device() == "cuda":
        return None
    tokens = settings.updates * int(settings.option("--max-tokens"))
    return tokens / _TOKENS_PER_SECOND * max(1.0, settings.jobs / cores())


def announce(settings: TextSettings) -> None:
    """Say how much there is to do, and about how long it takes."""
    count = len(settings.runs)
    total = seconds_left(TextResults(settings, []))
    time_left = (
        f"about {format_time(total)} on cores with no other work, the first seed "
        f"{format_time(total / len(settings.seeds))}"
        if total
        else "how long, the page says after the first training"
    )
    say(
        f"{count} trainings of {settings.updates:,} updates, "
        f"{min(settings.jobs, count)} at a time: {time_left}"
    )
