"""The most memory that a pass holds at once, beyond what was there before it."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from measuring.timing import Pass


def peak(run: Pass, device: torch.device) -> int:
    """Return the peak of a pass's own allocations in bytes.

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
    return _highest(profiled)


def _highest(profiled: profile) -> int:
    results: Any = profiled.profiler  # as torch has no public way to them
    found = results.kineto_results.events()
    events = [e for e in found if e.name() == "[memory]" and e.device_type() == DeviceType.CPU]
    held = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()  # negative when memory is given back
        highest = max(highest, held)
    return highest
