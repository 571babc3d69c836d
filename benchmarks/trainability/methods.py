"""The subject ``methods``: every encoding in every family, and the report of who learns."""

from __future__ import annotations

import argparse
import math
import statistics
from typing import Any, NamedTuple

from data import VOCABULARY
from reports import end, machine, own_command, write_figures, write_report
from runs import Run
from training import Store

from fairseq_posenc import registry
from fairseq_posenc.workbench.results.markdown import table

REFERENCES = ("none", "learned")  # beside the causal-only encodings, to compare them with
MARGIN = 0.1  # bits; a smaller difference is no finding


def method_runs(args: argparse.Namespace) -> list[Run]:
    """Return a run of every encoding in the families where it is compared."""
    both = registry.names_for(encoder=True, decoder=True)
    causal = set(registry.names_for(decoder=True)) - set(registry.names_for(encoder=True))
    names = {
        "masked LM": registry.names_for(encoder=True),
        "translation": both if args.files else [],
        "causal LM": [*REFERENCES, *causal],
    }
    wanted = set(args.methods or registry.names()) | {"none"}
    return [
        Run(family, name, seed, args.updates)
        for seed in args.seeds
        for family in args.families
        for name in sorted(names[family], key=lambda name: (name not in REFERENCES, name))
        if name in wanted
    ]


class Row(NamedTuple):
    """One encoding in one family: means over the seeds."""

    encoding: str
    before: float
    end: float
    seconds: float
    parameters: int

    @classmethod
    def of(cls, results: list[dict[str, Any]]) -> Row:
        """Return the means of runs that differ only in their seeds."""
        return cls(
            results[0]["encoding"],
            statistics.mean(result["before"] for result in results),
            statistics.mean(map(end, results)),
            statistics.mean(result["cpu_seconds_per_100"] for result in results),
            results[0]["position_parameters"],
        )


def report_methods(args: argparse.Namespace, facts: dict[str, Any], store: Store) -> None:
    """Train every encoding and write ``trainability.md`` and ``trainability.json``."""
    runs = method_runs(args)
    results = [store.get(run) for run in runs]
    lines = _introduction(args, facts)
    for family in dict.fromkeys(run.family for run in runs):
        mine = [result for result in results if result["family"] == family]
        names = dict.fromkeys(result["encoding"] for result in mine)
        rows = [Row.of([r for r in mine if r["encoding"] == name]) for name in names]
        level = facts["translation" if family == "translation" else "text"]["unigram"]
        lines += ["", f"## {family}", "", _method_table(rows), "", *_findings(rows, level)]
    write_figures(args.results / "trainability.json", facts, results)
    write_report(args.results / "trainability.md", lines)


def _introduction(args: argparse.Namespace, facts: dict[str, Any]) -> list[str]:
    text = facts["text"]
    return [
        "# Does every method learn?",
        "",
        f"Each encoding trains {args.updates} updates of a tiny model through `fairseq-train`'s "
        "own `main`: 2 layers (translation: 2 + 2), width 128, 4 heads, batches of 2,048 tokens "
        "(translation: 1,024), "
        "Adam with a learning rate of 0.003 after 100 updates of warm-up, no dropout; seeds "
        f"{', '.join(map(str, args.seeds))}. Order of the data and masks are equal. Initial "
        "weights have equal seeds, but an encoding that draws numbers shifts those drawn after it.",
        "",
        f"Language models read Python's documentation ({text['words']:,} words, of which "
        f"{text['valid_words']:,} for validation; {VOCABULARY['text']} sentencepieces, blocks of "
        "64 tokens); translation reads the parallel text of the command "
        f"({VOCABULARY['translation']:,} sentencepieces).",
        "",
        f"    {own_command(args)}",
        "",
        f"Machine: {machine()}.",
        "",
        "Losses are in bits per predicted token. *Before* is the first batch before the first "
        "update; the others are those of the validation text at the end. *Time* is processor time "
        "of an update (the median over the run), relative to `none`; it hardly depends on what "
        "else the machine does. Parameters are those of positions alone.",
    ]


def _method_table(rows: list[Row]) -> str:
    none = next(row for row in rows if row.encoding == "none")
    header = ["method", "before", "loss", "perplexity", "below `none`", "time", "parameters"]
    return table(
        header,
        [
            [
                f"`{row.encoding}`",
                f"{row.before:.2f}",
                f"{row.end:.3f}",
                f"{2**row.end:.1f}" if row.end < math.inf else "diverged",
                f"{none.end - row.end:+.3f}",
                f"{row.seconds / none.seconds:.2f}",
                f"{row.parameters:,}",
            ]
            for row in sorted(rows, key=lambda row: row.end)
        ],
    )


def _findings(rows: list[Row], unigram: float) -> list[str]:
    """Say by rule which methods learn, and which make use of positions."""
    none = next(row for row in rows if row.encoding == "none")
    still = [row.encoding for row in rows if row.end > unigram - MARGIN]
    others = [row for row in rows if row is not none]
    like_none = [row.encoding for row in others if abs(row.end - none.end) <= MARGIN]
    worse = [row.encoding for row in others if row.end > none.end + MARGIN]
    better = [row.encoding for row in others if row.end < none.end - MARGIN]
    return [
        f"- Knowing only how frequent each piece is gives {unigram:.2f} bits. Not {MARGIN} below "
        f"that, so not learning: {_names(still)}.",
        f"- More than {MARGIN} bits below `none`, so making use of positions: {_names(better)}.",
        f"- Within {MARGIN} bits of `none`, so positions do not show yet: {_names(like_none)}.",
        f"- More than {MARGIN} bits above `none`: {_names(worse)}.",
    ]


def _names(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "none of them"
