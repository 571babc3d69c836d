"""Writes the results of all runs: the record, ``results.md`` with the paper's figures, submissions.

The figures are those of the learning rate with the best mean, over all its seeds. Collapsed runs
are listed, and the figures are repeated without them. A submission has predictions for the test
sets as GLUE's site accepts them: a file for each set.
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from fairseq_posenc.errors import UserError
from fairseq_posenc.files import write_whole
from fairseq_posenc.tasks.glue.data import GlueDataBin
from fairseq_posenc.tasks.glue.definitions import SCORE_MAXIMUM, SUBMISSION, TASKS, WNLI, Task
from fairseq_posenc.workbench.finetuning.glue.runs import RESULT, GlueRun
from fairseq_posenc.workbench.loading.pretrained import Pretrained
from fairseq_posenc.workbench.results.markdown import table
from fairseq_posenc.workbench.results.record import Record, Row, own_command
from fairseq_posenc.workbench.running.files import read_json
from fairseq_posenc.workbench.training.recipes import reported

_METRICS = {"f1": "F1", "matthews": "Matthews", "pearson": "Pearson", "spearman": "Spearman"}
Tasks = dict[str, dict[str, Row]]  # rows by task and metric
# Figures in the papers: the best over the learning rates, or the mean over the seeds.
_REPORTED = {"m4m": "best", "decbert": "mean"}
Result = dict[str, Any]  # a run's learning rate, seed, metrics and folder
_SPREAD_HEAD = ["task", "metric", "learning rate", "seeds", "best", "mean", "median", "std"]


def write_results(runs: Sequence[GlueRun], out: Path, pretrained: Pretrained, name: str) -> Record:
    """Write ``results.json``, ``results.md`` and the submission; return the record.

    Args:
        runs: all runs planned in ``out``, finished or not.
        out: folder of the runs.
        pretrained: the pre-trained model.
        name: name of the model.
    """
    finished = [run for run in runs if run.is_finished(out)]
    tasks = {}
    for task in TASKS:
        if done := [run for run in finished if run.task == task]:
            metric = done[0].reported_metric
            results = [read_result(run, out) for run in done]
            tasks[task] = (metric, results)
            best = Path(find_best(results, metric)["folder"])
            for path in sorted(best.glob("submission/*.tsv")):
                (out / "submission").mkdir(exist_ok=True)
                shutil.copyfile(path, out / "submission" / path.name)
    data = {
        "name": name,
        "checkpoint": str(pretrained.path),
        "attention_directions": pretrained.directions,
        "protocol": runs[0].protocol,
        "unfinished": "; ".join(run.label for run in runs if run not in finished),
    }
    record = build_record(tasks, str(pretrained.spec), data)
    record.write(out / "results.json")
    write_whole(out / "results.md", format_report(record))
    return record


def read_result(run: GlueRun, out: Path) -> Result:
    """Read the result of a finished run.

    Raises:
        UserError: its file is not a result.
    """
    folder = run.folder(out)
    result = read_json(folder / RESULT)
    metrics = result.get("metrics") if isinstance(result, dict) else None
    score = metrics.get(run.reported_metric) if isinstance(metrics, dict) else None
    if not isinstance(score, (int, float)):
        raise UserError(f"{folder / RESULT}: is not a result of glue; delete it to repeat the run")
    return {"learning_rate": run.learning_rate, "seed": run.seed, **result, "folder": str(folder)}


def build_record(
    tasks: Mapping[str, tuple[str, Sequence[Result]]], spec: str, data: Mapping[str, Any]
) -> Record:
    """Build the record of all runs.

    Args:
        tasks: the reported metric of each task, and the results of its runs (at least one).
        spec: spec of the model's positions.
        data: other facts about the model and its runs.
    """
    figures: dict[str, list[Row]] = {"tasks": [], "without_collapsed": [], "runs": []}
    for task, (metric, results) in tasks.items():
        chosen, best = _select_best_rate(results, metric), find_best(results, metric)
        for name in best["metrics"]:
            row = {"task": task, "metric": name, "reported": name == metric}
            figures["tasks"].append({**row, **_summarise_seeds(chosen, name, best)})
        sound = [result for result in chosen if not result["collapsed"]]
        if sound and len(sound) < len(chosen):
            spread = _summarise_seeds(sound, metric, find_best(sound, metric))
            figures["without_collapsed"].append({"task": task, "metric": metric, **spread})
        for result in results:
            flat = {**result, **result["metrics"]}
            del flat["metrics"]
            figures["runs"].append({"task": task, **flat})
    return Record("glue", figures, data, spec, command=own_command())


def find_best(results: Sequence[Result], metric: str) -> Result:
    """Find the best run by a metric."""
    return max(results, key=lambda result: result["metrics"][metric])


def _select_best_rate(results: Sequence[Result], metric: str) -> list[Result]:
    """Select the runs of the learning rate with the best mean."""
    rates: dict[float, list[Result]] = {}
    for result in results:
        rates.setdefault(result["learning_rate"], []).append(result)

    def mean(runs: list[Result]) -> float:
        return statistics.fmean(run["metrics"][metric] for run in runs)

    return max(rates.values(), key=mean)


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
    tasks = Tasks()
    for row in record.figures["tasks"]:
        tasks.setdefault(row["task"], {})[row["metric"]] = row
    spread = [row for task in tasks for row in _build_spread_rows(record, task)]
    lines = [
        f"# GLUE: {data['name']}",
        "",
        f"Positions `{record.spec}`, protocol {data['protocol']}, checkpoint "
        f"`{data['checkpoint']}`. All figures are percentages of the development sets.",
        "",
        *_compare_with_paper(data, tasks),
        "",
        "## Learning rates and seeds",
        "",
        "The seeds are those of the learning rate with the best mean; `best` is over all runs.",
        "",
        table(_SPREAD_HEAD, spread, "l"),
        "",
    ]
    if collapsed := [run["folder"] for run in record.figures["runs"] if run["collapsed"]]:
        text = "(they predict the same for everything, or no better than chance)"
        lines += [f"Collapsed runs {text}, which the figures above include:", ""]
        lines += [*(f"- `{folder}`" for folder in collapsed), ""]
    lines.append("## All runs")
    for task, metrics in tasks.items():
        runs = [run for run in record.figures["runs"] if run["task"] == task]
        lines += ["", f"### {task}", "", _format_runs(runs, list(metrics))]
    for label in filter(None, data["unfinished"].split("; ")):
        lines += ["", f"Not finished: {label}."]
    return "\n".join(lines) + "\n"


def _compare_with_paper(data: Row, tasks: Tasks) -> Iterator[str]:
    statistic = _REPORTED[data["protocol"]]
    columns = _select_columns(tasks)
    ours = [f"**{data['name']}** ({_describe_selection(statistic, columns)})"]
    ours += [f"{row[statistic]:.2f}" for row in columns.values()]
    head = [
        "",
        *(f"{name} ({_format_metric(row['metric']).split()[0]})" for name, row in columns.items()),
    ]
    rows = [ours]
    notes = []
    for paper in reported().values():
        splits = {split for _, _, split in paper.columns.values()}
        is_of_protocol = paper.source == data["protocol"] and splits == {"dev"}
        if not (is_of_protocol and columns.keys() & paper.columns.keys()):
            continue
        for row in paper.rows:
            values = [row["values"].get(name) for name in columns]
            cells = ["" if value is None else f"{value:.2f}" for value in values]
            label = f"{row['name']}, `{row['position_encoding']}`, {paper.where}"
            rows.append([label, *cells])
        notes += [f"{paper.where.capitalize()}: {paper.note}"] if paper.note else []
    yield table(head, rows, "l")
    for note in notes:
        yield from ("", note)


def _select_columns(tasks: Tasks) -> dict[str, Row]:
    """Select our reported figures by the paper's column; MNLI has two columns."""
    columns = {}
    for task, metrics in tasks.items():
        (key,) = (metric for metric, row in metrics.items() if row["reported"])
        has_two = len(TASKS[task].valid_splits) > 1
        for column, metric in zip(TASKS[task].submission, [key, f"{key}m"] if has_two else [key]):
            columns[column] = metrics[metric]
    return columns


def _describe_selection(statistic: str, columns: dict[str, Row]) -> str:
    if statistic == "best":
        return "best run"
    seeds = sorted({row["seeds"] for row in columns.values()})
    return f"mean of {' or '.join(map(str, seeds))} seeds"


def _build_spread_rows(record: Record, task: str) -> Iterator[list[str]]:
    kinds = {
        task: [row for row in record.figures["tasks"] if row["reported"]],
        f"{task}, without collapsed runs": record.figures["without_collapsed"],
    }
    for name, rows in kinds.items():
        for row in rows:
            if row["task"] == task:
                values = [f"{row['learning_rate']:g}", str(row["seeds"])]
                values += [f"{row[key]:.2f}" for key in ("best", "mean", "median")]
                values.append(f"{row['std']:.2f}" if row["seeds"] > 1 else "-")
                yield [name, _format_metric(row["metric"]), *values]


def _format_runs(runs: Sequence[Row], metrics: Sequence[str]) -> str:
    head = ["learning rate", "seed", "best at update"]
    head += [*map(_format_metric, metrics), ""]
    rows = [
        [
            *(f"{run['learning_rate']:g}", str(run["seed"]), f"{run['update']:,}"),
            *(f"{run[metric]:.2f}" for metric in metrics),
            "collapsed" if run["collapsed"] else "",
        ]
        for run in runs
    ]
    return table(head, rows, "l")


def _format_metric(metric: str) -> str:
    """Format the name of a metric; ``_m`` and ``_mm`` stand for MNLI's development sets."""
    name, _, split = metric.partition("_")
    return f"{_METRICS.get(name, name)} {split}".strip()


def write_submission(
    folder: Path, name: str, data: GlueDataBin, split: str, outputs: Tensor
) -> None:
    """Write ``NAME.tsv`` with the columns index and prediction.

    Args:
        folder: made if it does not exist.
        name: name of the file without its suffix.
        data: data-bin of the task.
        split: name of the test set.
        outputs: the model's outputs in the order of the test set, ``(examples, classes)``.
    """
    folder.mkdir(exist_ok=True)
    predictions = format_predictions(data.task, outputs)
    write_predictions(folder / f"{name}.tsv", data.test_ids(split), predictions)


def write_predictions(path: Path, ids: Sequence[str], predictions: Sequence[str]) -> None:
    """Write a file of a submission, with the columns index and prediction."""
    rows = "".join(f"{index}\t{prediction}\n" for index, prediction in zip(ids, predictions))
    write_whole(path, "index\tprediction\n" + rows)


def complete_submission(folder: Path, data: Path) -> list[str]:
    """Add the file of WNLI, which predicts its majority class; list the files that are missing.

    Args:
        folder: folder of the submission.
        data: folder of the data-bins, with WNLI's file if preprocessing wrote it.

    Returns:
        The names of the missing files.
    """
    wnli = data / f"{WNLI.name}.tsv"
    if wnli.exists():
        folder.mkdir(exist_ok=True)
        shutil.copyfile(wnli, folder / wnli.name)
    return [name for name in SUBMISSION if not (folder / f"{name}.tsv").exists()]


def format_predictions(task: Task, outputs: Tensor) -> list[str]:
    """Format the outputs, (N, C), as labels, or as scores between 0 and 5."""
    if task.regression:
        scores = (outputs.view(-1) * SCORE_MAXIMUM).clamp(0, SCORE_MAXIMUM)
        return [f"{score:.3f}" for score in scores.tolist()]
    return [task.classes[number] for number in outputs.argmax(-1).tolist()]
