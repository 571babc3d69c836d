"""Figures of encodings, each from a record in ``docs/results``."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple, Optional

from fairseq_posenc import registry
from fairseq_posenc.analysis import catalogue
from fairseq_posenc.workbench.results.intervals import Interval, interval, interval_of_perplexity
from fairseq_posenc.workbench.results.record import Record, Row, read
from fairseq_posenc.workbench.running.shipped import shipped

MASKED, CAUSAL, BOTH = FAMILIES = ("masked-lm", "causal-lm", "encoder-decoder")
NOT_MEASURED = "not measured"
COMPARED = {MASKED: "masked_lm.json", CAUSAL: "causal_lm.json", BOTH: "translation.json"}
LENGTHS = {CAUSAL: "causal_lm_length_seed_*.json"}  # a record for each seed
PROBED = {CAUSAL: "probe_causal_lm.json"}
STARTED = {BOTH: "translation_swap.json"}
EARLY = "trainability.json"  # of one seed
COSTS = "benchmark_layer_one_thread_cpu.json"


class Column(NamedTuple):
    """A figure of every encoding for which there is one.

    Attributes:
        title: what it is.
        source: the files that it is from.
        digits: that are shown behind the point.
        of: the figures by encoding; infinite where one cannot be read.
        higher: whether the highest is the best one, and not the lowest.
    """

    title: str
    source: str
    digits: int
    of: Mapping[str, Interval]
    higher: bool = False

    def show(self, name: str) -> str:
        """Return the figure of an encoding as tables have it."""
        found = self.of.get(name)
        if found is None:
            return NOT_MEASURED
        return "cannot be read" if math.isinf(found.mean) else found.show(self.digits)

    def best(self) -> tuple[str, list[str], list[str]]:
        """Return whose figure is best, who is not told apart from it, and who is behind it."""
        best, *others = (name for name in self.ranked() if math.isfinite(self.of[name].mean))
        same = [name for name in others if self.of[name].overlaps(self.of[best])]
        return best, same, [name for name in others if name not in same]

    def ranked(self) -> list[str]:
        """Return names from the best figure on."""
        sign = -1 if self.higher else 1
        means = {name: sign * found.mean for name, found in self.of.items()}
        return sorted(means, key=lambda name: (math.isnan(means[name]), means[name]))


def names(family: str) -> list[str]:
    """Return the encodings that have a meaning in a family."""
    return registry.names_for(encoder=family != CAUSAL, decoder=family != MASKED)


def compared(family: str) -> Optional[Column]:
    """Return perplexities at the length of training, or BLEU; None if there are none."""
    record = _record(COMPARED[family])
    if record is None:
        return None
    if family == BOTH:
        return Column("BLEU", COMPARED[family], 2, _bleu(record, greedy=False), higher=True)
    found = {str(row["model"]): _interval(row, "perplexity") for row in record.rows}
    return Column("perplexity", COMPARED[family], 2, found)


def at_length(family: str, times: int) -> Optional[Column]:
    """Return perplexities at a number of times the length of training, None if not measured."""
    of = {
        name: interval_of_perplexity(values)
        for name, values in _by_times(family).get(times, {}).items()
    }
    title = f"perplexity at {times} times the length of training"
    return Column(title, LENGTHS[family], 2, of) if of else None


def multiples(family: str) -> list[int]:
    """Return the multiples of the length of training that were read."""
    return sorted(_by_times(family))


def _by_times(family: str) -> dict[int, dict[str, list[float]]]:
    found: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for path in _paths(LENGTHS.get(family)):
        for row in read(path).rows:
            times, rest = divmod(row["length"], row["trained_length"])
            if times and not rest:
                value = math.inf if row["perplexity"] is None else row["perplexity"]
                found[times][row["model"]].append(value)
    return found


def probed(family: str) -> Optional[Column]:
    """Return the ranks on tasks with known answers, longer than in training."""
    record = _record(PROBED.get(family))
    if record is None:
        return None
    rows = record.figures["ranks"]
    found = {str(row["model"]): _interval(row, "mean_reciprocal_rank") for row in rows}
    title = "mean reciprocal rank on tasks, longer than trained"
    return Column(title, PROBED[family], 2, found, higher=True)


def started(family: str) -> Column:
    """Return BLEU after a short training that began from another encoding's model."""
    title, record = "start from a trained model", _record(STARTED.get(family))
    if record is None:
        return Column(title, "", 0, {})
    title += ": BLEU, 120 updates after `sinusoidal`, greedily"
    return Column(title, STARTED[family], 2, _bleu(record, greedy=True), higher=True)


def _bleu(record: Record, greedy: bool) -> dict[str, Interval]:
    rows = [row for row in record.figures["means"] if (row["beam"] == 1) == greedy]
    return {str(row["system"]): _interval(row, "BLEU") for row in rows}


def early(family: str) -> list[Column]:
    """Return losses after a few updates of one seed, so without intervals, and what they cost."""
    called = {MASKED: "masked LM", CAUSAL: "causal LM", BOTH: "translation"}[family]
    runs = {
        run["encoding"]: run
        for path in _paths(EARLY)
        for run in json.loads(path.read_text(encoding="utf-8"))["runs"]
        if (run["family"], run["updates"], run["start"]) == (called, 300, "plain")
    }
    losses = {name: interval([run["curve"][-1][1]]) for name, run in runs.items()}
    none = runs["none"]["cpu_seconds_per_100"]
    times = {name: interval([run["cpu_seconds_per_100"] / none]) for name, run in runs.items()}
    return [
        Column("loss after 300 updates, bits, one seed", EARLY, 2, losses),
        Column("processor time of an update / `none`, 64 tokens", EARLY, 2, times),
    ]


def costs() -> list[Column]:
    """Return time and peak of memory of a layer in training, as shares of those of ``none``."""
    record = _record(COSTS)
    rows = {str(row["encoding"]): row for row in record.rows} if record else {}
    if "none" not in rows:
        return []
    of = {name: row for name, row in rows.items() if row["backend"] == rows["none"]["backend"]}
    time = {name: interval([row["ratio_to_none"]]) for name, row in of.items()}
    memory = {name: interval([row["memory"] / rows["none"]["memory"]]) for name, row in of.items()}
    return [
        Column("time of a layer / `none`, 512 tokens", COSTS, 2, time),
        Column("memory of a layer / `none`, 512 tokens", COSTS, 2, memory),
    ]


def parameters() -> Column:
    """Return the trained numbers at base size, which are counted."""
    counts = {name: interval([catalogue.count_at_base_size(name)]) for name in registry.names()}
    return Column("position parameters, base size", "", 0, counts)


def _interval(row: Row, name: str) -> Interval:
    """Return a figure of a record, in which there is no infinity."""
    mean, low, high = (row[key] for key in (name, f"{name}_low", f"{name}_high"))
    return Interval(
        math.nan if mean is None else mean,
        -math.inf if low is None else low,
        math.inf if high is None else high,
    )


def _record(name: Optional[str]) -> Optional[Record]:
    paths = _paths(name)
    return read(paths[0]) if paths else None


@cache
def _paths(pattern: Optional[str]) -> list[Path]:
    return sorted(shipped("docs/results").glob(pattern)) if pattern else []
