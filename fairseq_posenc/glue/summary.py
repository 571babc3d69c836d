"""What came of the runs: of each task the best, and mean, median and spread over the seeds.

The learning rate is the one with the best mean. All its seeds count; runs that collapsed are named,
and the same figures are given without them.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fairseq_posenc.glue.plan import RESULT, Run
from fairseq_posenc.reporting.record import Record, own_command
from fairseq_posenc.tasks.glue.definitions import TASKS

Result = dict[str, Any]  # of a run, as results.json has it


def read_result(run: Run, out: Path) -> Result:
    """Return a finished run as ``results.json`` has it."""
    folder = run.folder(out)
    found = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    return {"lr": run.learning_rate, "seed": run.seed, **found, "folder": str(folder)}


def reported_metric(run: Run) -> str:
    """Return the name, among a run's metrics, of the one that is reported."""
    two = len(TASKS[run.task].valid_splits) > 1
    return f"{run.metric}_m" if two else run.metric


def summarise(results: Sequence[Result], metric: str) -> dict[str, Any]:
    """Return a task's entry of ``results.json``.

    Args:
        results: of all its runs, at least one.
        metric: the reported one.
    """
    rates: dict[float, list[Result]] = {}
    for result in results:
        rates.setdefault(result["lr"], []).append(result)
    by_rate = {rate: spread(chosen, metric) for rate, chosen in rates.items()}
    rate = max(by_rate, key=lambda rate: by_rate[rate]["mean"])
    chosen, best = rates[rate], best_result(results, metric)
    upright = [result for result in chosen if not result["collapsed"]]
    return {
        "metric": metric,
        **spread(chosen, metric),
        "best": best["metrics"][metric],
        "best_run": best["folder"],
        "lr": rate,
        "seeds": len(chosen),
        "statistics": {name: spread(chosen, name) for name in chosen[0]["metrics"]},
        "collapsed": [result["folder"] for result in results if result["collapsed"]],
        "without_collapsed": (
            {**spread(upright, metric), "seeds": len(upright)} if upright else None
        ),
        "runs": list(results),
    }


def record(results: dict[str, Any]) -> Record:
    """Return the record of all runs.

    Args:
        results: the model, its protocol, and under ``tasks`` what :func:`summarise` returned.
    """
    tasks, runs = [], []
    for task, entry in results["tasks"].items():
        best = best_result(entry["runs"], entry["metric"])["metrics"]
        tasks += [
            {
                "task": task,
                "metric": metric,
                "reported": metric == entry["metric"],
                "learning_rate": entry["lr"],
                "seeds": entry["seeds"],
                "best": best[metric],
                **{name: figures[name] for name in ("mean", "median", "std")},
            }
            for metric, figures in entry["statistics"].items()
        ]
        runs += [
            {
                "task": task,
                "learning_rate": run["lr"],
                **{name: run[name] for name in ("seed", "update")},
                **run["metrics"],
                **{name: run[name] for name in ("collapsed", "folder")},
            }
            for run in entry["runs"]
        ]
    names = ("name", "checkpoint", "attention_directions", "protocol")
    data = {
        **{name: results[name] for name in names},
        "unfinished": "; ".join(results["unfinished"]),
    }
    spec = results["position_encoding"]
    return Record("glue", {"tasks": tasks, "runs": runs}, data, spec, command=own_command())


def best_result(results: Sequence[Result], metric: str) -> Result:
    """Return the run that is best by a metric."""
    return max(results, key=lambda result: result["metrics"][metric])


def spread(results: Sequence[Result], metric: str) -> dict[str, float]:
    """Return best, mean, median and standard deviation (of a sample; 0 for a single run)."""
    values = [result["metrics"][metric] for result in results]
    return {
        "best": max(values),
        "mean": statistics.fmean(values),
        "median": statistics.median(values),
        "std": statistics.stdev(values) if len(values) > 1 else 0.0,
    }
