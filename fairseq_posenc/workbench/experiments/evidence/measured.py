"""Figures of encodings, each from a record in ``docs/results``."""

from __future__ import annotations

import json
import math
import shlex
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple, Optional

from fairseq_posenc import registry
from fairseq_posenc.analysis import catalogue
from fairseq_posenc.workbench.experiments.text_settings import STACKS, option_value
from fairseq_posenc.workbench.experiments.variants import BOTH, CAUSAL, MASKED
from fairseq_posenc.workbench.results.differences import PERPLEXITY, Scale, Values, behind
from fairseq_posenc.workbench.results.intervals import Interval, interval, interval_of_perplexity
from fairseq_posenc.workbench.results.record import Record, Row, read
from fairseq_posenc.workbench.running.files import shipped

NOT_MEASURED = "not measured"
COMPARED = {MASKED: "masked_lm.json", CAUSAL: "causal_lm.json", BOTH: "translation.json"}
# Models trained later, alike; one that is in the first record too is left out here.
NEWER = {MASKED: "masked_lm_newer.json", CAUSAL: "causal_lm_newer.json"}
# Models trained on another text: it, the record, and those of other lengths, if any.
ELSEWHERE = {
    MASKED: ("WikiText-2", "masked_lm_wikitext2.json", None),
    CAUSAL: ("WikiText-2, 4 layers", "patterns.json", "patterns_length_seed_*.json"),
}
LENGTHS = {CAUSAL: "causal_lm*_length_seed_*.json"}  # a record for each seed
PROBED = {CAUSAL: "probe_causal_lm.json"}
STARTED = {
    MASKED: "masked_lm_start.json",
    CAUSAL: "causal_lm_start.json",
    BOTH: "translation_swap.json",
}
TUNED = {MASKED: "glue.json"}
EARLY = "trainability.json"  # of one seed
COSTS = "benchmark_layer_one_thread_cpu.json"
_BLEU, _SCORE = Scale("BLEU", higher=True), Scale("score", higher=True)
_TRANSLATED = (  # docs/results/multi30k.md
    "encoder-decoder models of 2 + 2 layers of width 128, trained for 1,000 updates on Multi30k, "
    "French to English, 3 seeds"
)


class Setting(NamedTuple):
    """What the figures of a family were measured on."""

    models: str  # size, text, updates and seeds, in words
    trained: int  # the length of training, in tokens; 0 where texts have their own lengths
    longest: int  # that was read, in tokens; in words where texts have their own lengths

    def covers(self, length: int, trained: int) -> bool:
        """Whether models trained and read at these lengths were measured."""
        return length <= self.longest and self.trained in (0, trained)


class Column(NamedTuple):
    """A figure of every encoding for which there is one."""

    title: str  # what it is
    source: str  # the files that it is from
    digits: int  # that are shown behind the point
    of: Mapping[str, Interval]  # the figures by encoding; infinite where one cannot be read
    higher: bool = False  # whether the highest is the best one, and not the lowest
    seeds: Mapping[str, Values] = {}  # the figures by encoding and seed, where there are several
    scale: Scale = PERPLEXITY  # on which differences are taken

    def show(self, name: str) -> str:
        """Format the figure of an encoding as tables have it."""
        found = self.of.get(name)
        if found is None:
            return NOT_MEASURED
        return "cannot be read" if math.isinf(found.mean) else found.show(self.digits)

    def best(self) -> tuple[str, list[str], list[str]]:
        """Find the best, those not significantly different from it, and those behind it."""
        best, *others = (name for name in self.ranked() if math.isfinite(self.of[name].mean))
        seeds = {name: self.seeds.get(name, {}) for name in others}
        found = behind(self.seeds.get(best, {}), seeds, self.scale)
        same, worse = (
            [n for n in others if (n in found) == is_worse] for is_worse in (False, True)
        )
        return best, same, worse

    def ranked(self) -> list[str]:
        """Sort names from the best figure on."""
        sign = -1 if self.higher else 1
        means = {name: sign * found.mean for name, found in self.of.items()}
        return sorted(means, key=lambda name: (math.isnan(means[name]), means[name]))


def names(family: str) -> list[str]:
    """List the encodings that have a meaning in a family."""
    return registry.names_for(encoder=family != CAUSAL, decoder=family != MASKED)


def compared(family: str) -> Optional[Column]:
    """Read perplexities at the length of training, or BLEU; None if there are none."""
    record = _record(COMPARED[family])
    if record is None:
        return None
    if family == BOTH:
        of, rows = _bleu(record, greedy=False), record.rows
        seeds = _by_seed([row for row in rows if row["beam"] != 1], "system", "training", "BLEU")
        return Column("BLEU", COMPARED[family], 2, of, higher=True, seeds=seeds, scale=_BLEU)
    source, (found, seeds) = COMPARED[family], _perplexities(record)
    if more := _record(NEWER[family]):
        source = f"{source}, {NEWER[family]}"
        newer, newer_seeds = _perplexities(more)
        found, seeds = {**newer, **found}, {**newer_seeds, **seeds}
    return Column("perplexity", source, 2, found, seeds=seeds)


def elsewhere(family: str) -> list[Column]:
    """Read perplexities of models that were trained on another text, and far beyond its length."""
    text, name, lengths = ELSEWHERE.get(family, ("", None, None))
    record = _record(name)
    if record is None or name is None:
        return []
    found, seeds = _perplexities(record)
    columns = [Column(f"perplexity on {text}", name, 2, found, seeds=seeds)]
    if times := max(_by_times(lengths), default=0):
        further = at_length(family, times, lengths)
        columns += [further._replace(title=f"{text}, {times} times the length")] if further else []
    return columns


def tuned(family: str) -> list[Column]:
    """Read the scores of models that were fine-tuned: a column for each task, and their mean."""
    record = _record(TUNED.get(family))
    if record is None:
        return []
    source, columns = TUNED[family], []
    for task in dict.fromkeys(row["task"] for row in record.rows):
        rows = [row for row in record.rows if row["task"] == task]
        runs = [run for run in record.figures["runs"] if run["task"] == task]
        found = {str(row["model"]): _interval(row, "score") for row in rows}
        title = "GLUE: " + ", ".join(filter(None, (task, runs[0]["metric"])))
        seeds = _by_seed(runs, "model", "seed", "score")
        columns.append(Column(title, source, 1, found, higher=True, seeds=seeds, scale=_SCORE))
    return columns


def _perplexities(record: Record) -> tuple[dict[str, Interval], dict[str, dict[int, float]]]:
    """Read the perplexities of models, at their best learning rates; those of all seeds, too."""
    found = {str(row["model"]): _interval(row, "perplexity") for row in record.rows}
    rates = {row["model"]: row["lr"] for row in record.rows}
    rows = [row for row in record.figures["trainings"] if row["lr"] == rates[row["model"]]]
    return found, _by_seed(rows, "model", "seed", "perplexity")


def setting(family: str) -> Optional[Setting]:
    """Describe what the figures of a family were measured on; None if there are none."""
    record = _record(COMPARED[family])
    if record is None:
        return None
    if family == BOTH:
        groups = [row["words"] for row in record.figures["lengths"]]
        return Setting(_TRANSLATED, 0, max(int(group.split("-")[-1]) for group in groups))
    data, row, words = record.data, record.rows[0], shlex.split(record.command)
    options = words[words.index("--") + 1 :] if "--" in words else []
    layers, width = (
        option_value(family, options, f"--{STACKS[family]}-{name}")
        for name in ("layers", "embed-dim")
    )
    models = (
        f"{family} models of {layers} layers of width {width}, trained for {row['updates']:,} "
        f"updates at {data['trained_length']:,} tokens on {data['text']} "
        f"({data['words']:,} words), {row['seeds']} seeds"
    )
    trained = data["trained_length"]
    return Setting(models, trained, trained * max(multiples(family), default=1))


def _by_seed(rows: Iterable[Row], name: str, seed: str, figure: str) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for row in rows:
        found[row[name]][row[seed]] = math.nan if row[figure] is None else row[figure]
    return found


def at_length(family: str, times: int, records: Optional[str] = None) -> Optional[Column]:
    """Read perplexities at a number of times the length of training, None if not measured.

    ``records`` are others than those of the family's table.
    """
    source = records or LENGTHS.get(family)
    found = _by_times(source).get(times, {})  # a value for each record, so for each seed
    of = {name: interval_of_perplexity(values) for name, values in found.items()}
    seeds = {name: dict(enumerate(values)) for name, values in found.items()}
    title = f"perplexity at {times} times the length of training"
    return Column(title, source, 2, of, seeds=seeds) if source and of else None


def multiples(family: str) -> list[int]:
    """List the multiples of the length of training that were read."""
    return sorted(_by_times(LENGTHS.get(family)))


def _by_times(records: Optional[str]) -> dict[int, dict[str, list[float]]]:
    found: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for path in _paths(records):
        for row in read(path).rows:
            times, rest = divmod(row["length"], row["trained_length"])
            if times and not rest:
                value = math.inf if row["perplexity"] is None else row["perplexity"]
                found[times][row.get("position_encoding") or row["model"]].append(value)
    return found


def probed(family: str) -> Optional[Column]:
    """Read the ranks on tasks with known answers, longer than in training."""
    record = _record(PROBED.get(family))
    if record is None:
        return None
    rows = record.figures["ranks"]
    found = {str(row["model"]): _interval(row, "mean_reciprocal_rank") for row in rows}
    title = "mean reciprocal rank on tasks, longer than trained"
    return Column(title, PROBED[family], 2, found, higher=True)


def started(family: str) -> Column:
    """Read BLEU or perplexity after a short training that began from another encoding's model."""
    title, record = "start from a trained model", _record(STARTED.get(family))
    if record is None:
        return Column(title, "", 0, {})
    if family != BOTH:
        found, seeds = _perplexities(record)
        after = f"{record.rows[0]['updates']} updates after `{record.data['source']}`"
        return Column(f"{title}: perplexity, {after}", STARTED[family], 2, found, seeds=seeds)
    title += ": BLEU, 120 updates after `sinusoidal`, greedily"
    return Column(title, STARTED[family], 2, _bleu(record, greedy=True), higher=True)


def _bleu(record: Record, greedy: bool) -> dict[str, Interval]:
    rows = [row for row in record.figures["means"] if (row["beam"] == 1) == greedy]
    return {str(row["system"]): _interval(row, "BLEU") for row in rows}


def early(family: str) -> list[Column]:
    """Read losses after a few updates of one seed, so without intervals, and what they cost."""
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
    """Read time and peak of memory of a layer in training, as shares of those of ``none``."""
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
    """Count the trained numbers at base size."""
    counts = {name: interval([catalogue.count_at_base_size(name)]) for name in registry.names()}
    return Column("position parameters, base size", "", 0, counts)


def _interval(row: Row, name: str) -> Interval:
    """Read a figure of a record, in which there is no infinity."""
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
