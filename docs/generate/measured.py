"""Reads columns of figures by encoding from the records in ``docs/results``.

A column has no figures if nothing was measured in a family. A figure that no record has is "not
measured".
"""

from __future__ import annotations

import math
import shlex
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple, Optional

from fairseq_posenc.workbench.experiments.choose.answer import (
    BLEU,
    UNREADABLE,
    Evidence,
    Measurement,
    compare_with_best,
)
from fairseq_posenc.workbench.experiments.choose.from_trained import Change
from fairseq_posenc.workbench.experiments.text_experiment import STACKS, option_value
from fairseq_posenc.workbench.experiments.variants import CAUSAL, ENCODER_DECODER, MASKED
from fairseq_posenc.workbench.results import markdown
from fairseq_posenc.workbench.results.differences import PERPLEXITY, Scale, Values, find_different
from fairseq_posenc.workbench.results.intervals import Interval, interval, interval_of_perplexity
from fairseq_posenc.workbench.results.record import Record, Row, read

NOT_MEASURED = "not measured"
RESULTS = Path(__file__).parents[1] / "results"
# Records of the models trained for choose.md, by family.
MAIN_RECORD = {
    MASKED: "masked_lm.json",
    CAUSAL: "causal_lm.json",
    ENCODER_DECODER: "translation.json",
}
# Encodings added later and trained in the same way; encodings of an earlier record are left out.
NEWER_RECORDS = {
    "masked_lm.json": ("masked_lm_newer.json",),
    "causal_lm.json": ("causal_lm_newer.json", "causal_lm_inkling.json"),
    "wikitext2_causal_lm.json": ("wikitext2_causal_lm_inkling.json",),
}
# Models trained on another text: its name, their record, and the records of longer inputs.
ANOTHER_TEXT: dict[str, list[tuple[str, str, Optional[str]]]] = {
    MASKED: [("WikiText-2", "masked_lm_wikitext2.json", None)],
    CAUSAL: [
        ("WikiText-2", "wikitext2_causal_lm.json", "wikitext2_causal_lm*_length_seed_*.json"),
        ("WikiText-2, 4 layers", "patterns.json", "patterns_length_seed_*.json"),
    ],
}
LENGTH_RECORDS = {CAUSAL: "causal_lm*_length_seed_*.json"}  # a record for each seed
# Models that were trained with one encoding and continue with another.
SWITCH_RECORD = {
    MASKED: "masked_lm_start.json",
    CAUSAL: "causal_lm_start.json",
    ENCODER_DECODER: "translation_swap.json",
}
# Of a model that people use: read with other positions, and trained on with other positions.
_REAL_MODEL = "SmolLM2-135M-Instruct, its weights expanded from 4 bits"
REAL_RECORDS = ("smollm2_length.json", "smollm2_length_16384.json")
CONTINUED_RECORD = "smollm2_continued.json"
GLUE_RECORDS = {MASKED: ("glue.json", "glue_small.json")}
COST_RECORD = "benchmark_layer_one_thread_cpu.json"
LONG_COST_RECORD = "benchmark_layer_rows_cpu.json"  # its longest sentences
_SCORE = Scale("score", higher_is_better=True)
_TRANSLATION_MODELS = (  # docs/results/multi30k.md
    "encoder-decoder models of 2 + 2 layers of width 128, trained for 1,000 updates on Multi30k, "
    "French to English, 3 seeds"
)


class Column(NamedTuple):
    """A figure of all encodings that have it."""

    title: str  # name of the figure, and heading of the column
    source: str  # file names of the records
    digits: int  # decimals in tables
    figures: Mapping[str, Interval]  # by encoding; infinite if the model cannot read the input
    by_seed: Mapping[str, Values] = {}  # by encoding and seed, if there are several seeds
    scale: Scale = PERPLEXITY  # the scale on which encodings are compared

    def show(self, name: str) -> str:
        """Format the figure of an encoding for a table."""
        figure = self.figures.get(name)
        if figure is None:
            return NOT_MEASURED
        return UNREADABLE if math.isinf(figure.mean) else figure.show(self.digits)

    def verdicts(self) -> dict[str, str]:
        """Compare the encodings with the best one; see :func:`compare_with_best`."""
        means = {name: figure.mean for name, figure in self.figures.items()}
        return compare_with_best(means, self.by_seed, self.scale)

    def list_better_than_median(self) -> set[str]:
        """List the encodings that are significantly better than the median one."""
        ranked = self.ranked()
        middle = len(ranked) // 2
        better = {name: self.by_seed.get(name, {}) for name in ranked[:middle]}
        return find_different(self.by_seed.get(ranked[middle], {}), better, self.scale)

    def costs(self) -> dict[str, float]:
        """Collect the means with a sign with which lower is better."""
        sign = -1 if self.scale.higher_is_better else 1
        return {name: sign * figure.mean for name, figure in self.figures.items()}

    def ranked(self) -> list[str]:
        """Sort the encodings, best first; NaN last."""
        costs = self.costs()
        return sorted(costs, key=lambda name: (math.isnan(costs[name]), costs[name]))


def at_trained_length(family: str) -> Column:
    """Read perplexities at the length in training; for translation, BLEU."""
    if family == ENCODER_DECODER:
        return _read_bleu(MAIN_RECORD[family], "BLEU", greedy=False)
    return _read_perplexities(MAIN_RECORD[family], "perplexity")


def on_another_text(family: str) -> list[Column]:
    """Read perplexities of models of another text, at the length in training and far beyond."""
    columns = []
    for text, name, lengths in ANOTHER_TEXT.get(family, ()):
        columns.append(_read_perplexities(name, f"perplexity on {text}"))
        if times := max(_read_perplexities_by_multiple(lengths), default=0):
            further = at_multiple(family, times, lengths)
            columns.append(further._replace(title=f"{text}, {times} times the length"))
    return columns


def fine_tuned(family: str) -> list[Column]:
    """Read the scores of fine-tuned models: a column for each task of GLUE, and their means."""
    columns = []
    for name, record in _read_records(*GLUE_RECORDS.get(family, ())).items():
        tasks = [*dict.fromkeys(row["task"] for row in record.rows)]  # with "mean" after several
        for task in tasks:
            rows = [row for row in record.rows if row["task"] == task]
            runs = [run for run in record.figures["runs"] if run["task"] == task]
            scores = {str(row["model"]): _read_interval(row, "score") for row in rows}
            label = f"mean of {', '.join(tasks[:-1])}" if task == "mean" else task
            title = "GLUE: " + ", ".join(filter(None, (label, runs[0]["metric"])))
            seeds = _group_by_seed(runs, "model", "seed", "score")
            columns.append(Column(title, name, 1, scores, seeds, _SCORE))
    return columns


def _read_perplexities(name: str, title: str) -> Column:
    """Read the perplexities at the best learning rates, of a record and of newer ones beside it."""
    records = _read_records(name, *NEWER_RECORDS.get(name, ()))
    figures: dict[str, Interval] = {}
    seeds: dict[str, dict[int, float]] = {}
    for record in reversed(records.values()):
        figures |= {str(row["model"]): _read_interval(row, "perplexity") for row in record.rows}
        rates = {row["model"]: row["lr"] for row in record.rows}
        rows = [row for row in record.figures["trainings"] if row["lr"] == rates[row["model"]]]
        seeds |= _group_by_seed(rows, "model", "seed", "perplexity")
    return Column(title, ", ".join(records), 2, figures, seeds)


def collect_evidence(family: str) -> Evidence:
    """Collect the evidence of ``fairseq-posenc choose``."""
    columns = {"1": at_trained_length(family)}
    columns |= {str(n): at_multiple(family, n) for n in multiples(family)}
    times = [column.figures for column in layer_costs()[:1]]
    return Evidence(
        *_describe_models(family),
        figures={factor: _to_measurement(column) for factor, column in columns.items()},
        times={name: round(time.mean, 2) for by_name in times for name, time in by_name.items()},
    )


def list_changes(family: str) -> list[Change]:
    """List what a change of positions does to trained models, for ``choose --from-trained``."""
    changes = []
    if family == CAUSAL:
        changes += _list_changes_by_length() + _list_continued()
    column = after_switch(family)
    if column.by_seed:
        kept = "sinusoidal" if family == ENCODER_DECODER else "rope"
        models = f"{family} models of 2 layers of width 128 that had `{kept}`, three seeds"
        title = column.title.partition(": ")[2]
        changes.append(
            Change(models, kept, math.inf, _to_measurement(column)._replace(title=title))
        )
    return changes


def _list_changes_by_length() -> list[Change]:
    """List what a change does to a real model at each length, without training."""
    models = (
        f"{_REAL_MODEL}, without training after the change, on eight windows of WikiText-2's test "
        "set"
    )
    changes: dict[int, Change] = {}  # by length; of a length in two records, the first
    trained = 0  # length at which the model was trained
    for name, record in _read_records(*REAL_RECORDS).items():
        rows = record.rows
        for length in {row["length"] for row in rows} - changes.keys():
            values: dict[str, list[Optional[float]]] = {
                str(row["override"] or "own"): [
                    round(value, 6) for column, value in row.items() if column.startswith("window_")
                ]
                for row in rows
                if row["length"] == length
            }
            title = f"perplexity at {length:,} tokens, with its 95 % interval over the windows"
            changes[length] = Change(models, "own", length, Measurement(title, name, False, values))
            trained = rows[0]["trained_length"]
    # A change decides for texts up to its length: this one for all up to the trained length.
    longest = max(length for length in changes if length <= trained)
    changes[longest] = changes[longest]._replace(up_to=trained)
    return [change for _, change in sorted(changes.items())]


def _list_continued() -> list[Change]:
    """List what a change does to a real model that is trained a little after it."""
    record = _read_cached(RESULTS / CONTINUED_RECORD)
    (updates,) = {row["updates"] for row in record.rows}
    values: dict[str, list[Optional[float]]] = {
        row["model"]: [
            round(math.exp(loss), 6) for name, loss in row.items() if name.startswith("loss_")
        ]
        for row in record.figures["curves"]
        if row["updates"] == updates
    }
    length = record.data["tokens_per_update"]
    models = (
        f"{_REAL_MODEL}, after {updates} updates of {length:,} tokens of WikiText-2's training "
        "set, one seed"
    )
    blocks = len(next(iter(values.values())))
    title = (
        f"perplexity at {length:,} tokens, with its 95 % interval over {blocks} blocks of the "
        "validation set"
    )
    measurement = Measurement(title, CONTINUED_RECORD, False, values)
    return [Change(models, "own", math.inf, measurement)]


def _to_measurement(column: Column) -> Measurement:
    """Round the values of seeds, the best encoding first; None if diverged, or not readable."""
    values = {
        name: [
            round(value, 6) if math.isfinite(value) else None
            for _, value in sorted(column.by_seed[name].items())
        ]
        for name in column.ranked()
    }
    return Measurement(column.title, column.source, column.scale.higher_is_better, values)


def _describe_models(family: str) -> tuple[str, int, int]:
    """Describe the models of :func:`at_trained_length`; return their lengths as well."""
    record = _read_cached(RESULTS / MAIN_RECORD[family])
    if family == ENCODER_DECODER:
        groups = [row["words"] for row in record.figures["lengths"]]
        return _TRANSLATION_MODELS, 0, max(int(group.split("-")[-1]) for group in groups)
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
    return models, trained, trained * max(multiples(family), default=1)


def _group_by_seed(
    rows: Iterable[Row], name: str, seed: str, figure: str
) -> dict[str, dict[int, float]]:
    by_seed: dict[str, dict[int, float]] = defaultdict(dict)
    for row in rows:
        by_seed[row[name]][row[seed]] = math.nan if row[figure] is None else row[figure]
    return by_seed


def at_multiple(family: str, times: int, records: Optional[str] = None) -> Column:
    """Read perplexities at a multiple of the length in training.

    ``records`` is a pattern of the records' names, by default that of the family.
    """
    source = records or LENGTH_RECORDS.get(family, "")
    seeds = _read_perplexities_by_multiple(source).get(times, {})
    figures = {name: interval_of_perplexity([*by_seed.values()]) for name, by_seed in seeds.items()}
    title = f"perplexity at {times} times the length of training"
    return Column(title, source, 2, figures, seeds)


def multiples(family: str) -> list[int]:
    """List the multiples of the length in training, beyond it, at which models were evaluated."""
    found = _read_perplexities_by_multiple(LENGTH_RECORDS.get(family))
    return sorted(times for times in found if times > 1)


def _read_perplexities_by_multiple(
    records: Optional[str],
) -> dict[int, dict[str, dict[int, float]]]:
    """Read perplexities by multiple of the trained length, encoding, and seed of the record."""
    by_multiple: dict[int, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for path in sorted(RESULTS.glob(records)) if records else ():
        seed = int(path.stem.rpartition("_")[2])
        for row in _read_cached(path).rows:
            times, rest = divmod(row["length"], row["trained_length"])
            if times and not rest:
                value = math.inf if row["perplexity"] is None else row["perplexity"]
                by_multiple[times][row.get("position_encoding") or row["model"]][seed] = value
    return by_multiple


def after_switch(family: str) -> Column:
    """Read BLEU or perplexity after a short training from a model of another encoding."""
    name, title = SWITCH_RECORD[family], "start from a trained model"
    if family == ENCODER_DECODER:
        after = "120 updates after `sinusoidal`, greedily"
        return _read_bleu(name, f"{title}: BLEU, {after}", greedy=True)
    for record in _read_records(name).values():
        after = f"{record.rows[0]['updates']} updates after `{record.data['source']}`"
        title += f": perplexity, {after}"
    return _read_perplexities(name, title)


def _read_bleu(name: str, title: str, greedy: bool) -> Column:
    """Read BLEU by greedy or by beam search."""
    figures: dict[str, Interval] = {}
    seeds: dict[str, dict[int, float]] = {}
    for record in _read_records(name).values():
        means = [row for row in record.figures["means"] if (row["beam"] == 1) == greedy]
        figures = {str(row["system"]): _read_interval(row, "BLEU") for row in means}
        rows = [row for row in record.rows if (row["beam"] == 1) == greedy]
        seeds = _group_by_seed(rows, "system", "training", "BLEU")
    return Column(title, name, 2, figures, seeds, BLEU)


def layer_costs() -> list[Column]:
    """Read time and peak memory of a training step of a layer, divided by those of ``none``."""
    return [
        Column(f"{cost} of a layer / `none`, {length:,} tokens", source, 2, figures)
        for source, record in _read_records(COST_RECORD, LONG_COST_RECORD).items()
        for length in [max(int(row["length"]) for row in record.rows)]
        for cost, figures in _read_layer_costs(record, length).items()
    ]


def _read_layer_costs(record: Record, length: int) -> dict[str, dict[str, Interval]]:
    """Read time and memory by encoding, on the first backend of ``none``."""
    rows = [row for row in record.rows if row["length"] == length]
    none = next(row for row in rows if row["encoding"] == "none")
    same = {str(row["encoding"]): row for row in rows if row["backend"] == none["backend"]}
    return {
        "time": {name: interval([row["ratio_to_none"]]) for name, row in same.items()},
        "memory": {name: interval([row["memory"] / none["memory"]]) for name, row in same.items()},
    }


def list_result_columns(family: str) -> list[Column]:
    """Collect all columns of results that have figures, of longer inputs the longest."""
    columns = [
        at_trained_length(family),
        at_multiple(family, max(multiples(family), default=0)),
        *on_another_text(family),
        *fine_tuned(family),
        after_switch(family),
    ]
    return [column for column in columns if column.figures]


def format_columns(columns: Sequence[Column], names: Iterable[str]) -> str:
    """Format columns as a Markdown table, a row for each encoding."""
    header = ["encoding", *(column.title for column in columns)]
    rows = [
        [f"`{name}`", *(column.show(name) if name in column.figures else "-" for column in columns)]
        for name in names
    ]
    return markdown.table(header, rows)


def _read_interval(row: Row, name: str) -> Interval:
    """Read a figure of a record; null stands for infinite bounds, which JSON does not have."""
    mean, low, high = (row[key] for key in (name, f"{name}_low", f"{name}_high"))
    return Interval(
        math.nan if mean is None else mean,
        -math.inf if low is None else low,
        math.inf if high is None else high,
    )


def _read_records(*names: str) -> dict[str, Record]:
    """Read records by the names of their files; those that do not exist are left out."""
    paths = {name: RESULTS / name for name in names}
    return {name: _read_cached(path) for name, path in paths.items() if path.exists()}


_read_cached = cache(read)
