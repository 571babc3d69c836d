"""Writes the results of all runs: the record, ``results.md`` and the submission.

A task's figures are statistics over the seeds of the learning rate with the best mean. Collapsed
runs are listed, and the figures are repeated without them. A submission has predictions for the
test sets as GLUE's site accepts them: a file for each set. MNLI has two development sets, matched
and mismatched: the names of its metrics end in ``_m`` or ``_mm``, as in ``accuracy_mm``.
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from fairseq_posenc.files import write_whole
from fairseq_posenc.folders import read_json
from fairseq_posenc.tasks.glue.definitions import (
    SCORE_MAXIMUM,
    SUBMISSION,
    TASKS,
    WNLI,
    Task,
    name_column,
)
from fairseq_posenc.workbench.finetuning.glue.runs import RESULT, STATISTICS, GlueRun
from fairseq_posenc.workbench.loading.pretrained import Pretrained
from fairseq_posenc.workbench.results.markdown import table
from fairseq_posenc.workbench.results.record import Record, Row, own_command

_METRIC_TITLES = {"f1": "F1", "matthews": "Matthews", "pearson": "Pearson", "spearman": "Spearman"}
TaskRows = dict[str, dict[str, Row]]  # rows of the record's first table, by task and metric
Result = dict[str, Any]  # a run's learning rate, seed, metrics and folder
_SPREAD_COLUMNS = ["task", "metric", "learning rate", "seeds", "best", "mean", "median", "std"]


def write_results(runs: Sequence[GlueRun], out: Path, pretrained: Pretrained, name: str) -> Record:
    """Write results and submission of all runs of a folder, finished or not; return the record."""
    finished = [run for run in runs if (run.folder(out) / RESULT).exists()]
    tasks = {}
    for task in TASKS:
        if task_runs := [run for run in finished if run.task == task]:
            metric = task_runs[0].reported_metric  # the protocol's, so the same for all
            results = [read_result(run, out) for run in task_runs]
            tasks[task] = (metric, results)
            best = Path(find_best(results, metric)["folder"])
            for path in sorted(best.glob("submission/*.tsv")):
                (out / "submission").mkdir(exist_ok=True)
                shutil.copyfile(path, out / "submission" / path.name)
    facts = {
        "name": name,
        "checkpoint": str(pretrained.path),
        "attention_directions": pretrained.directions,
        "protocol": runs[0].protocol,
        "unfinished": "; ".join(run.label for run in runs if run not in finished),
    }
    record = build_record(tasks, str(pretrained.spec), facts)
    record.write(out / "results.json")
    write_whole(out / "results.md", format_report(record))
    return record


def read_result(run: GlueRun, out: Path) -> Result:
    """Read the result of a finished run."""
    folder = run.folder(out)
    figures = {"learning_rate": run.learning_rate, "seed": run.seed}
    return {**figures, **read_json(folder / RESULT), "folder": str(folder)}


def build_record(
    tasks: Mapping[str, tuple[str, Sequence[Result]]], spec: str, facts: Mapping[str, Any]
) -> Record:
    """Build the record of all runs.

    Args:
        tasks: the reported metric of each task, and the results of its runs (at least one).
        spec: spec of the model's positions.
        facts: other facts about the model and its runs.
    """
    figures: dict[str, list[Row]] = {"tasks": [], "without_collapsed": [], "runs": []}
    for task, (metric, results) in tasks.items():
        selected = _select_best_rate(results, metric)
        best = find_best(results, metric)  # of all learning rates
        for name in best["metrics"]:
            row = {"task": task, "metric": name, "reported": name == metric}
            figures["tasks"].append({**row, **_summarise_seeds(selected, name, best)})
        sound = [result for result in selected if not result["collapsed"]]
        if sound and len(sound) < len(selected):
            spread = _summarise_seeds(sound, metric, find_best(sound, metric))
            figures["without_collapsed"].append({"task": task, "metric": metric, **spread})
        for result in results:
            flat = {**result, **result["metrics"]}
            del flat["metrics"]
            figures["runs"].append({"task": task, **flat})
    return Record("glue", figures, facts, spec, command=own_command())


def find_best(results: Sequence[Result], metric: str) -> Result:
    """Find the result that is best by a metric."""
    return max(results, key=lambda result: result["metrics"][metric])


def _select_best_rate(results: Sequence[Result], metric: str) -> list[Result]:
    """Select the results of the learning rate with the best mean over its seeds."""
    by_rate: dict[float, list[Result]] = {}
    for result in results:
        by_rate.setdefault(result["learning_rate"], []).append(result)

    def compute_mean(results_of_rate: list[Result]) -> float:
        return statistics.fmean(result["metrics"][metric] for result in results_of_rate)

    return max(by_rate.values(), key=compute_mean)


def _summarise_seeds(results: Sequence[Result], metric: str, best: Result) -> Row:
    """Compute the best, mean, median and sample standard deviation (0 for a single run)."""
    values = [result["metrics"][metric] for result in results]
    return {
        "learning_rate": results[0]["learning_rate"],
        "seeds": len(values),
        "best": best["metrics"][metric],
        "mean": statistics.fmean(values),
        "median": statistics.median(values),
        "std": statistics.stdev(values) if len(values) > 1 else 0.0,
    }


def format_report(record: Record) -> str:
    """Format the report in Markdown."""
    data = record.data
    tasks: TaskRows = {}
    for row in record.figures["tasks"]:
        tasks.setdefault(row["task"], {})[row["metric"]] = row
    lines = [
        f"# GLUE: {data['name']}",
        "",
        f"Positions `{record.spec}`, protocol {data['protocol']}, checkpoint "
        f"`{data['checkpoint']}`. All figures are percentages of the development sets.",
        "",
        _format_reported(data, tasks),
        "",
        "## Learning rates and seeds",
        "",
        "The seeds are those of the learning rate with the best mean; `best` is over all runs.",
        "",
        table(_SPREAD_COLUMNS, _build_spread_rows(record, tasks), "l"),
        "",
    ]
    if collapsed := [run["folder"] for run in record.figures["runs"] if run["collapsed"]]:
        text = "(they predict the same for everything, or no better than chance)"
        lines += [f"Collapsed runs {text}, which the figures above include:", ""]
        lines += [*(f"- `{folder}`" for folder in collapsed), ""]
    if data["unfinished"]:
        lines += [f"Not finished: {data['unfinished']}.", ""]
    return "\n".join(lines)


def _format_reported(data: Row, tasks: TaskRows) -> str:
    """Format the figures that the protocol's paper reports, in its columns."""
    statistic = STATISTICS[data["protocol"]]
    columns = _select_columns(tasks)
    head = [""]
    figures = [f"**{data['name']}** ({_describe_selection(statistic, columns)})"]
    for name, row in columns.items():
        metric = _format_metric(row["metric"]).split()[0]  # MNLI's set is in the column's name
        head.append(f"{name} ({metric})")
        figures.append(f"{row[statistic]:.2f}")
    return table(head, [figures], "l")


def _select_columns(tasks: TaskRows) -> dict[str, Row]:
    """Select our reported figures by the paper's column: a task, or one of MNLI-m and MNLI-mm."""
    columns = {}
    for task, metrics in tasks.items():
        (reported_metric,) = (metric for metric, row in metrics.items() if row["reported"])
        _, reported = name_column(task, reported_metric)
        for metric, row in metrics.items():
            column, name = name_column(task, metric)
            if name == reported:
                columns[column] = row
    return columns


def _describe_selection(statistic: str, columns: dict[str, Row]) -> str:
    if statistic == "best":
        return "best run"
    seeds = sorted({row["seeds"] for row in columns.values()})
    return f"mean of {' or '.join(map(str, seeds))} seeds"


def _build_spread_rows(record: Record, tasks: TaskRows) -> Iterator[list[str]]:
    """Yield a task's row over all seeds, then one without its collapsed runs if it has some."""
    without_collapsed = {row["task"]: row for row in record.figures["without_collapsed"]}
    for task, metrics in tasks.items():
        rows = [(task, row) for row in metrics.values() if row["reported"]]
        if task in without_collapsed:
            rows.append((f"{task}, without collapsed runs", without_collapsed[task]))
        for name, row in rows:
            values = [f"{row['learning_rate']:g}", str(row["seeds"])]
            values += [f"{row[key]:.2f}" for key in ("best", "mean", "median")]
            values.append(f"{row['std']:.2f}" if row["seeds"] > 1 else "-")
            yield [name, _format_metric(row["metric"]), *values]


def _format_metric(metric: str) -> str:
    """Format the name of a metric, such as ``accuracy mm`` for ``accuracy_mm``."""
    name, _, split = metric.partition("_")
    return f"{_METRIC_TITLES.get(name, name)} {split}".strip()


def write_predictions(path: Path, ids: Sequence[str], predictions: Sequence[str]) -> None:
    """Write a file of a submission, with the columns index and prediction."""
    rows = "".join(f"{index}\t{prediction}\n" for index, prediction in zip(ids, predictions))
    write_whole(path, "index\tprediction\n" + rows)


def complete_submission(folder: Path, data: Path) -> list[str]:
    """Add the file of WNLI, if preprocessing wrote it to the data; list the files still missing."""
    wnli = data / f"{WNLI.name}.tsv"
    if wnli.exists():
        folder.mkdir(exist_ok=True)
        shutil.copyfile(wnli, folder / wnli.name)
    return [name for name in SUBMISSION if not (folder / f"{name}.tsv").exists()]


def format_predictions(task: Task, outputs: Tensor) -> list[str]:
    """Format the outputs ``(N, C)`` as labels, or those of STS-B as scores from 0 to 5."""
    if task.regression:
        scores = (outputs.view(-1) * SCORE_MAXIMUM).clamp(0, SCORE_MAXIMUM)
        return [f"{score:.3f}" for score in scores.tolist()]
    return [task.classes[label] for label in outputs.argmax(-1).tolist()]
