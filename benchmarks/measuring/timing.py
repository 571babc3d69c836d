"""Measures passes: time, in turns so that other work affects all equally, and memory."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

Pass = Callable[[], None]
WARM_UP = 2  # passes before the first timed one, to compile kernels and allocate memory
MIN_SECONDS = 0.05  # shorter passes are timed several in a row
MIN_ROUNDS = 3  # even if they take too long


def clock(device: torch.device) -> Callable[[], float]:
    """Choose a clock in seconds.

    With one thread it counts processor time, which other programs hardly disturb; with several
    threads, or on a GPU, it counts wall-clock time.
    """
    if device.type == "cuda":

        def wait_and_read() -> float:
            torch.cuda.synchronize(device)
            return time.perf_counter()

        return wait_and_read
    return time.process_time if torch.get_num_threads() == 1 else time.perf_counter


def interleaved(
    passes: Sequence[Pass], device: torch.device, rounds: int, limit: float = math.inf
) -> list[list[float]]:
    """Time passes in turns; return a list of seconds for each round, in the order of ``passes``.

    No round begins after ``limit`` seconds, once three are finished.
    """
    now = clock(device)
    repeats = [_count_repeats(run, now) for run in passes]
    end = time.monotonic() + limit
    seconds: list[list[float]] = []
    while len(seconds) < rounds and (len(seconds) < MIN_ROUNDS or time.monotonic() < end):
        seconds.append([_time(run, count, now) for run, count in zip(passes, repeats)])
    return seconds


def median(rounds: list[list[float]], index: int) -> float:
    """Compute the median seconds of a pass."""
    return statistics.median(times[index] for times in rounds)


def ratio(rounds: list[list[float]], index: int, baseline: int) -> float:
    """Compute the median over the rounds of the ratio of a pass's time to another's."""
    return statistics.median(times[index] / times[baseline] for times in rounds)


def _count_repeats(run: Pass, now: Callable[[], float]) -> int:
    """Warm up, and choose how many passes to time in a row, so that the clock is exact enough."""
    _time(run, WARM_UP - 1, now)  # the next line has the last pass of the warm-up
    return max(1, math.ceil(MIN_SECONDS / max(_time(run, 1, now), 1e-6)))


def _time(run: Pass, count: int, now: Callable[[], float]) -> float:
    """Measure the mean seconds of a pass that runs ``count`` times in a row."""
    began = now()
    for _ in range(count):
        run()
    return (now() - began) / count


def peak(run: Pass, device: torch.device) -> int:
    """Measure the peak of a pass's own allocations in bytes.

    On a GPU torch counts them. On the CPU torch's profiler reports the size of every allocation of
    torch's allocator, also inside kernels, so the figure is exact and repeatable; it does not
    include memory that other libraries allocate themselves. Run the pass once before, so that
    tensors that are made only once do not count.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    return _find_peak(profiled)


def _find_peak(profiled: profile) -> int:
    results: Any = profiled.profiler  # torch has no public function for the events
    events = sorted(results.kineto_results.events(), key=lambda event: event.start_ns())
    held = 0
    highest = 0
    for event in events:
        if event.name() == "[memory]" and event.device_type() == DeviceType.CPU:
            held += event.nbytes()  # negative when memory is given back
            highest = max(highest, held)
    return highest
