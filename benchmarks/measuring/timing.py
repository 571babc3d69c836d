"""Times of passes that take turns, so that other work of the machine meets all alike; memory."""

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
WARM_UP = 2  # passes before the first that counts: kernels compiled, memory there
SHORTEST = 0.05  # seconds; shorter passes are timed several in a row
FEWEST = 3  # rounds, however little time there is


def clock(device: torch.device) -> Callable[[], float]:
    """Choose a clock in seconds.

    With one thread it is that of the processor's work, which other programs hardly disturb; with
    several, or on a GPU, it is the time that passes.
    """
    if device.type == "cuda":

        def waited() -> float:
            torch.cuda.synchronize(device)
            return time.perf_counter()

        return waited
    return time.process_time if torch.get_num_threads() == 1 else time.perf_counter


def interleaved(
    passes: Sequence[Pass], device: torch.device, rounds: int, limit: float = math.inf
) -> list[list[float]]:
    """Time passes: the seconds of each, for each round a list in the order of ``passes``.

    Args:
        passes: what to time; every round runs each of them.
        device: where they run.
        rounds: how many times.
        limit: seconds after which no further round begins, once there are three.
    """
    now = clock(device)
    repeats = [_count_repeats(run, now) for run in passes]
    end = time.monotonic() + limit
    seconds: list[list[float]] = []
    while len(seconds) < rounds and (len(seconds) < FEWEST or time.monotonic() < end):
        seconds.append([_time(run, times, now) for run, times in zip(passes, repeats)])
    return seconds


def median(rounds: list[list[float]], index: int) -> float:
    """Compute the median seconds of a pass."""
    return statistics.median(times[index] for times in rounds)


def ratio(rounds: list[list[float]], index: int, baseline: int) -> float:
    """Compute the median over the rounds of a pass's time by that of another in the same round."""
    return statistics.median(times[index] / times[baseline] for times in rounds)


def _count_repeats(run: Pass, now: Callable[[], float]) -> int:
    """Warm up, and choose how often to run a pass so that the clock can tell."""
    _time(run, WARM_UP - 1, now)
    return max(1, math.ceil(SHORTEST / max(_time(run, 1, now), 1e-6)))


def _time(run: Pass, times: int, now: Callable[[], float]) -> float:
    began = now()
    for _ in range(times):
        run()
    return (now() - began) / times


def peak(run: Pass, device: torch.device) -> int:
    """Measure the peak of a pass's own allocations in bytes.

    On a GPU torch keeps count of them. On the CPU torch's profiler reports every allocation of
    torch's allocator with its size, also those inside kernels, so that the figure is exact and
    repeatable; scratch memory that other libraries take for themselves is not in it.

    Args:
        run: the pass; run it once before, so that what is made only once does not count.
        device: where it runs.
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
    results: Any = profiled.profiler  # as torch has no public way to them
    events_seen = results.kineto_results.events()
    events = [
        e for e in events_seen if e.name() == "[memory]" and e.device_type() == DeviceType.CPU
    ]
    held = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()  # negative when memory is given back
        highest = max(highest, held)
    return highest
