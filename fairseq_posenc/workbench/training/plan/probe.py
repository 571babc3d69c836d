"""A short run of a training, and what its log tells."""

from __future__ import annotations

import resource
import statistics
import sys
from typing import NamedTuple, Optional

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.running.logs import machine_facts, read_line

_WANTED = ("wpb", "bsz", "gb_free")


class Measurements(NamedTuple):
    """What a probe gave."""

    seconds_per_update: float  # median
    tokens_per_second: float  # median, of all GPUs together
    tokens_per_update: float  # median
    sequences_per_update: float  # median
    updates_per_epoch: int  # as fairseq counts them; of a shard, if there are several
    devices: int  # how many GPUs, or 1 processor
    gpu: Optional[str]  # name of the first GPU, None on a processor
    # most that was allocated on it at a time, in GiB; None on a processor
    gpu_memory: Optional[float]
    gpu_total: Optional[float]  # its memory in GiB, None on a processor
    checkpoint_seconds: Optional[float]  # time to write a checkpoint


class _Update(NamedTuple):
    time: float  # when its line came, in seconds
    epoch_size: int
    values: dict[str, float]


class Watch:
    """Reads the log of a training, which has a line for each update."""

    def __init__(self) -> None:
        self.updates: list[_Update] = []
        self._machine: dict[str, str] = {}

    def read(self, text: str, time: float) -> bool:
        """Take in a line that came at a time, in seconds; return whether it is an update's."""
        self._machine.update(machine_facts(text.rstrip()))
        line = read_line(text.rstrip())
        if line is None or line.kind != "train_inner":
            return False
        figures = {name: float(line.figures[name]) for name in _WANTED if name in line.figures}
        self.updates.append(_Update(time, line.updates_per_epoch, figures))
        return True

    def measurements(self, left_out: int) -> Measurements:
        """Return the figures without the first updates.

        Raises:
            UserError: there are not more than these.
        """
        counted = self.updates[left_out:]
        if left_out < 1 or not counted:
            raise UserError(
                f"the probe's log has {len(self.updates)} updates, and the first {left_out} do not "
                "count; is there a --log-file or --quiet that keeps the rest from its output?"
            )
        before = self.updates[left_out - 1 : -1]
        seconds = [now.time - then.time for then, now in zip(before, counted)]
        tokens = [update.values["wpb"] for update in counted]
        free = [each.values["gb_free"] for each in self.updates if "gb_free" in each.values]
        numbers = {name: float(value) for name, value in self._machine.items() if name != "gpu"}
        total = numbers.get("gpu_total")
        return Measurements(
            seconds_per_update=statistics.median(seconds),
            tokens_per_second=statistics.median(t / s for t, s in zip(tokens, seconds)),
            tokens_per_update=statistics.median(tokens),
            sequences_per_update=statistics.median(each.values["bsz"] for each in counted),
            updates_per_epoch=max(update.epoch_size for update in self.updates),
            devices=int(numbers.get("devices", 1)),
            gpu=self._machine.get("gpu"),
            gpu_memory=total - min(free) if total and free else None,
            gpu_total=total,
            checkpoint_seconds=numbers.get("checkpoint_seconds"),
        )


def largest_process() -> float:
    """Return the memory that the largest process started from here held at most, in GiB."""
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)  # Linux counts in KiB
