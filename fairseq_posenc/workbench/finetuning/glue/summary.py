"""Summarises the runs of each task: the best, and mean, median and spread over the seeds.

The learning rate is the one with the best mean. All its seeds count; collapsed runs are named, and
the same figures are given without them.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fairseq_posenc.errors import UserError
from fairseq_posenc.tasks.glue.definitions import TASKS
from fairseq_posenc.workbench.finetuning.glue.plan import RESULT, Run
from fairseq_posenc.workbench.results.record import Record, Row, own_command
from fairseq_posenc.workbench.running.files import read_json

Result = dict[str, Any]  # a run's learning rate, seed, metrics and folder


def read_result(run: Run, out: Path) -> Result:
    """Read the result of a finished run.

    Raises:
        UserError: its file holds none.
    """
    folder = run.folder(out)
    found = read_json(folder / RESULT)
    metrics = found.get("metrics") if isinstance(found, dict) else None
    score = metrics.get(reported_metric(run)) if isinstance(metrics, dict) else None
    if not isinstance(score, (int, float)):
        raise UserError(f"{folder / RESULT}: is no result of glue; delete it to make it anew")
    return {"learning_rate": run.learning_rate, "seed": run.seed, **found, "folder": str(folder)}


def reported_metric(run: Run) -> str:
    """Name the metric of a run that is reported."""
    two = len(TASKS[run.task].valid_splits) > 1
    return f"{run.metric}_m" if two else run.metric


def build_record(
    tasks: Mapping[str, tuple[str, Sequence[Result]]], spec: str, data: Mapping[str, Any]
) -> Record:
    """Build the record of all runs.

    Args:
        tasks: for each task the reported metric, and the results of its runs, at least one.
        spec: spec of the model's positions.
        data: other facts about the model and its runs.
    """
    figures: dict[str, list[Row]] = {"tasks": [], "without_collapsed": [], "runs": []}
    for task, (metric, results) in tasks.items():
        chosen, best = _best_rate(results, metric), find_best(results, metric)
        for name in best["metrics"]:
            row = {"task": task, "metric": name, "reported": name == metric}
            figures["tasks"].append({**row, **_spread(chosen, name, best)})
        upright = [result for result in chosen if not result["collapsed"]]
        if upright and len(upright) < len(chosen):
            spread = _spread(upright, metric, find_best(upright, metric))
            figures["without_collapsed"].append({"task": task, "metric": metric, **spread})
        for result in results:
            flat = {**result, **result["metrics"]}
            del flat["metrics"]
            figures["runs"].append({"task": task, **flat})
    return Record("glue", figures, data, spec, command=own_command())


def find_best(results: Sequence[Result], metric: str) -> Result:
    """Find the best run by a metric."""
    return max(results, key=lambda result: result["metrics"][metric])


def _best_rate(results: Sequence[Result], metric: str) -> list[Result]:
    """Select the runs of the learning rate with the best mean."""
    rates: dict[float, list[Result]] = {}
    for result in results:
        rates.setdefault(result["learning_rate"], []).append(result)
    return max(
        rates.values(), key=lambda runs: statistics.fmean(each["metrics"][metric] for each in runs)
    )


def _spread(results: Sequence[Result], metric: str, best: Result) -> Row:
    """Compute mean, median and sample standard deviation (0 for a single run); add the best."""
    values = [result["metrics"][metric] for result in results]
    return {
        "learning_rate": results[0]["learning_rate"],
        "seeds": len(values),
        "best": best["metrics"][metric],
        "mean": statistics.fmean(values),
        "median": statistics.median(values),
        "std": statistics.stdev(values) if len(values) > 1 else 0.0,
    }
