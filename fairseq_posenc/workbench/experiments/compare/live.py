"""Follows a running comparison: estimates its duration, and rewrites the report as a live page."""

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
from fairseq_posenc.workbench.experiments.text_experiment import TextExperiment, TextResults
from fairseq_posenc.workbench.loading.checkpoints import updates_done
from fairseq_posenc.workbench.running.devices import choose_device, cores
from fairseq_posenc.workbench.running.progress import format_time, say

# Costs measured with models of the default size. A pass is a forward and a backward pass. Once a
# training has finished, estimates use its seconds, in which fairseq does not count the start.
_PASSES_OF_UPDATE = 1.2  # an update, with its batch, masks, optimizer and log, in passes
_UPDATES_OF_VALIDATION = 6.5  # a validation with its checkpoint, in updates
_UPDATES_OF_START = 48  # start of a training, in updates
_UPDATES_OF_TEXT = 150  # preparation of Python's documentation, in updates
_START_SECONDS = 20.0  # start of one of five trainings on two cores
_REPORT_SECONDS = 20.0  # time between two reports; drawing takes one or two seconds


class Live:
    """Rewrites the report while trainings go on; ``opens_browser`` shows the first in a browser."""

    def __init__(self, opens_browser: bool) -> None:
        self._must_open_browser = opens_browser
        self._next_report = time.monotonic() + _REPORT_SECONDS

    def __call__(self, read_results: Callable[[], TextResults]) -> None:
        """Write the report with the results so far, unless the last report is recent."""
        if time.monotonic() < self._next_report:
            return
        results = read_results()
        if results.outcomes or any(curve.entries for curve in results.begun.values()):
            path = write_report(results, estimate_seconds_left(results)).with_name(PAGE)
            if self._must_open_browser:
                say(f"page of the run: {path}")
                open_in_browser(path.resolve().as_uri())
            self._must_open_browser = False
        self._next_report = time.monotonic() + _REPORT_SECONDS


def open_in_browser(address: str) -> None:
    """Open a page in the user's browser, unless there is no screen."""
    if sys.platform == "darwin" or {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys():
        webbrowser.open(address)


def estimate_seconds_left(results: TextResults) -> Optional[float]:
    """Estimate the time for the missing trainings.

    None before the first training is finished, and on a cluster, where jobs also wait.
    """
    experiment, missing = results.experiment, results.missing
    durations = [outcome.seconds for outcome in results.outcomes if not outcome.diverged_at]
    if experiment.cluster or not durations or not missing:
        return None
    curves = [curve for curve in results.begun.values() if curve.entries]
    updates_made = sum(curve.entries[-1].updates for curve in curves)
    trainings_left = len(missing) - updates_made / experiment.updates
    return trainings_left * (fmean(durations) + _START_SECONDS) / min(experiment.jobs, len(missing))


def announce(experiment: TextExperiment) -> None:
    """Print the number of trainings and, for default models on a processor, an estimated time."""
    total = len(experiment.runs)
    updates = experiment.updates
    left = sum(updates_done(experiment.folder(run)) < updates for run in experiment.runs)
    done = "" if left == total else f", {total - left} of them done"
    jobs = min(experiment.jobs, left)
    if not left:
        time_left = "nothing is left to train"
    elif experiment.train_args or choose_device() == "cuda":
        time_left = f"{experiment.out / PAGE} estimates the time after the first training"
    else:
        at_once = min(jobs, cores())
        update_seconds = _PASSES_OF_UPDATE * _measure_pass(at_once)
        validations = _UPDATES_OF_VALIDATION * experiment.points
        training_seconds = update_seconds * (updates + validations + _UPDATES_OF_START)
        text_seconds = update_seconds * _UPDATES_OF_TEXT
        left_of_seed = min(left, total / len(experiment.seeds))  # trainings of the first seed
        first = format_time(text_seconds + left_of_seed * training_seconds / at_once)
        time_left = f"on cores with no other work about {first}"
        if left > left_of_seed:
            all_seeds = format_time(text_seconds + left * training_seconds / at_once)
            time_left += f" for the first seed, {all_seeds} for all"
    say(f"{total} trainings of {updates:,} updates{done}, {max(jobs, 1)} at a time: {time_left}")


def _measure_pass(threads: int) -> float:
    """Measure the seconds of processor time that a pass of a default model takes.

    It runs in all ``threads`` at once, as trainings will: cores are slower when all are busy.
    """

    def measure() -> float:
        torch.set_num_threads(1)  # for this thread
        # Width, attention heads, width of the feed-forward part, dropout, activation.
        layer = nn.TransformerEncoderLayer(128, 4, 512, 0.0, "gelu", batch_first=True)
        model = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        embeddings = torch.randn(48, 64, 128)  # as many tokens as in a batch, 3,072
        seconds = []
        for _ in range(5):
            began = time.thread_time()
            model(embeddings).sum().backward()
            seconds.append(time.thread_time() - began)
        return median(seconds)

    with ThreadPoolExecutor(threads) as pool:
        return fmean(pool.map(lambda _: measure(), range(threads)))
