"""The subject ``methods``: trains every encoding in every family, and reports which ones learn."""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Mapping
from typing import Any, NamedTuple

from data import VOCABULARY
from reports import describe_origin, last_loss, write_figures, write_report
from training import Store, TrainingRun

from fairseq_posenc import registry
from fairseq_posenc.workbench.results.markdown import table

REFERENCES = ("none", "learned")  # beside the causal-only encodings, to compare them with
MARGIN = 0.1  # bits; a smaller difference is not a finding


def method_runs(args: argparse.Namespace) -> list[TrainingRun]:
    """List a run of every encoding in the families where it is compared."""
    both = registry.names(encoder=True)  # for encoders and causal models
    names = {
        "masked LM": both,
        "translation": both if args.files else [],
        "causal LM": [*REFERENCES, *(set(registry.names()) - set(both))],
    }
    wanted = set(args.methods or registry.names()) | {"none"}
    return [
        TrainingRun(family, name, seed, args.updates)
        for seed in args.seeds
        for family in args.families
        for name in sorted(names[family], key=lambda name: (name not in REFERENCES, name))
        if name in wanted
    ]


class MethodMeans(NamedTuple):
    """One encoding in one family: means over the seeds."""

    encoding: str
    end: float  # validation loss, in bits per token
    seconds: float  # processor time of 100 updates


def _average(results: list[dict[str, Any]]) -> MethodMeans:
    """Average runs that differ only in their seeds."""
    return MethodMeans(
        results[0]["encoding"],
        statistics.mean(map(last_loss, results)),
        statistics.mean(result["cpu_seconds_per_100"] for result in results),
    )


def report_methods(args: argparse.Namespace, facts: dict[str, Any], store: Store) -> None:
    """Train every encoding and write ``trainability.md`` and ``trainability.json``."""
    results = [store.get(run) for run in method_runs(args)]
    write_figures(args.results / "trainability.json", facts, results)
    write_report(args.results / "trainability.md", format_report(args, facts, results))


def format_report(
    args: argparse.Namespace, facts: dict[str, Any], results: list[dict[str, Any]]
) -> list[str]:
    """Format the report."""
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for result in results:
        runs.setdefault(result["family"], {}).setdefault(result["encoding"], []).append(result)
    families = {
        family: {name: _average(seeds) for name, seeds in encodings.items()}
        for family, encodings in runs.items()
    }
    findings = "\n".join(_find_failures(families, facts))
    return [*_introduce(args, facts), _tabulate(families), findings]


def _introduce(args: argparse.Namespace, facts: dict[str, Any]) -> list[str]:
    text = facts["text"]
    return [
        "# Does every method learn?",
        f"Each encoding trains {args.updates} updates of a tiny model with `fairseq-train`: 2 "
        "layers (translation: 2 + 2), width 128, 4 heads, batches of 2,048 tokens (translation: "
        "1,024), Adam with a learning rate of 0.003 after 100 updates of warm-up, no dropout; "
        f"seeds {', '.join(map(str, args.seeds))}. All read the same batches and masks.",
        f"Language models read Python's documentation ({text['words']:,} words, of which "
        f"{text['valid_words']:,} for validation; {VOCABULARY['text']} sentencepieces, blocks of "
        "64 tokens); translation reads the parallel text of the command "
        f"({VOCABULARY['translation']:,} sentencepieces).",
        *describe_origin(),
        "Validation loss at the end in bits per token, and in brackets how far it is below that of "
        "`none`. *Time* is processor time of an update relative to `none`, in the first family.",
    ]


def _tabulate(families: Mapping[str, Mapping[str, MethodMeans]]) -> str:
    """Format a row for each encoding, in the order of the first family."""
    first = next(iter(families.values()))
    names: dict[str, None] = {}  # an ordered set
    for means in families.values():
        names |= dict.fromkeys(sorted(means, key=lambda name: means[name].end))
    cells = [
        [
            f"`{name}`",
            *(_format_loss(means.get(name), means["none"]) for means in families.values()),
            f"{first[name].seconds / first['none'].seconds:.2f}" if name in first else "-",
        ]
        for name in names
    ]
    return table(["method", *families, "time"], cells)


def _format_loss(row: MethodMeans | None, none: MethodMeans) -> str:
    if row is None:
        return "-"
    return f"{row.end:.3f} ({none.end - row.end:+.3f})" if row.end < math.inf else "diverged"


def _find_failures(
    families: Mapping[str, Mapping[str, MethodMeans]], facts: dict[str, Any]
) -> list[str]:
    """List the methods that do not learn, by a fixed rule."""
    lines = []
    for family, means in families.items():
        level = facts["translation" if family == "translation" else "text"]["unigram"]
        failures = [f"`{row.encoding}`" for row in means.values() if row.end > level - MARGIN]
        lines.append(
            f"- {family}: knowing only how frequent each piece is gives {level:.2f} bits; not "
            f"{MARGIN} below that: {', '.join(failures) or 'none of them'}."
        )
    return lines
