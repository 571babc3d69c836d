"""The report while the trainings go on: how long they take, and a page that follows them."""

from __future__ import annotations

import os
import sys
import time
import webbrowser
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import fmean, median
from typing import Optional

import torch
from torch import nn

from fairseq_posenc.workbench.experiments.compare.report import PAGE, write_report
from fairseq_posenc.workbench.experiments.text_experiment import TextResults, TextSettings
from fairseq_posenc.workbench.running.devices import choose_device, cores
from fairseq_posenc.workbench.running.progress import format_time, say

# Measured on default models.
_PASSES_OF_UPDATE = 1.2  # an update, with its batch, masks, optimizer and log, in passes
_UPDATES_OF_VALIDATION = 6.5  # a validation with its checkpoint, in updates
_UPDATES_OF_START = 48  # the start of a training
_UPDATES_OF_TEXT = 150  # making Python's documentation into data
_OVERHEAD = 20.0  # seconds of a training that fairseq does not count, with five on two cores
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
            path = write_report(results, estimate_seconds_left(results)).with_name(PAGE)
            if self._opens:
                say(f"page of the run: {path}")
                open_in_browser(path.resolve().as_uri())
            self._opens = False
        self._next = time.monotonic() + _EVERY


def open_in_browser(address: str) -> None:
    """Open a page in the user's browser, where there is a screen for one."""
    if sys.platform == "darwin" or {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys():
        webbrowser.open(address)


def estimate_seconds_left(results: TextResults) -> Optional[float]:
    """Estimate how long the missing trainings take, once one is finished; else None."""
    settings, missing = results.settings, results.missing
    known = [outcome.seconds for outcome in results.outcomes if not outcome.diverged]
    if not known or not missing:
        return None
    done = [curve.entries[-1].updates for curve in results.begun.values() if curve.entries]
    parts = len(missing) - sum(done) / settings.updates
    return parts * (fmean(known) + _OVERHEAD) / min(settings.jobs, len(missing))


def announce(settings: TextSettings) -> None:
    """Say how much there is to do, and about how long it takes on this machine.

    That is unknown on a GPU, and for models that are not of the default sizes.
    """
    count = len(settings.runs)
    jobs = min(settings.jobs, count)
    if settings.train_args or choose_device() == "cuda":
        time_left = "the page estimates the time after the first training"
    else:
        at_once = min(jobs, cores())
        update = _PASSES_OF_UPDATE * _measure_pass(at_once)
        validations = _UPDATES_OF_VALIDATION * settings.points
        training = update * (settings.updates + validations + _UPDATES_OF_START)
        first, all_seeds = (
            format_time(
                update * _UPDATES_OF_TEXT + seeds * count / len(settings.seeds) * training / at_once
            )
            for seeds in (1, len(settings.seeds))
        )
        time_left = f"on cores with no other work about {first}" + (
            f" for the first seed, {all_seeds} for all" if len(settings.seeds) > 1 else ""
        )
    say(f"{count} trainings of {settings.updates:,} updates, {jobs} at a time: {time_left}")


def _measure_pass(threads: int) -> float:
    """Measure the processor time of a pass and its gradient in a default model.

    It runs in as many threads as trainings will, as cores are slower when all are busy.
    """

    def measure() -> float:
        torch.set_num_threads(1)  # of this thread
        layers = [
            nn.TransformerEncoderLayer(128, 4, 512, 0.0, "gelu", batch_first=True) for _ in range(2)
        ]
        seconds, model, embeddings = [], nn.Sequential(*layers), torch.randn(48, 64, 128)
        for _ in range(5):
            began = time.thread_time()
            model(embeddings).sum().backward()
            seconds.append(time.thread_time() - began)
        return median(seconds)

    with ThreadPoolExecutor(threads) as pool:
        return fmean(pool.map(lambda _: measure(), range(threads)))
