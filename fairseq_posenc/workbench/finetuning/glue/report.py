"""Writes the results of all runs: the record, ``results.md`` and the submission.

A task's figures are statistics over the seeds of the learning rate with the best mean; collapsed
runs are listed. A submission has predictions for the test sets as GLUE's site accepts them: a file
for each set. MNLI has two development sets, matched and mismatched: the names of its metrics end in
``_m`` or ``_mm``, as in ``accuracy_mm``.
"""

import shutil
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from fairseq_posenc.checkpoints.recovery import BEST
from fairseq_posenc.files import write_whole
from fairseq_posenc.folders import read_json
from fairseq_posenc.tasks.glue.definitions import SCORE_MAXIMUM, SUBMISSION, TASKS, WNLI, Task
from fairseq_posenc.workbench.finetuning.glue.runs import RESULT, GlueRun
from fairseq_posenc.workbench.finetuning.glue_figures import STATISTIC_TITLES, select_figures
from fairseq_posenc.workbench.loading.pretrained import Pretrained
from fairseq_posenc.workbench.results.markdown import table
from fairseq_posenc.workbench.results.record import Record, Row, group_by, own_command

_METRIC_TITLES = {"f1": "F1", "matthews": "Matthews", "pearson": "Pearson", "spearman": "Spearman"}
_SPREAD_COLUMNS = ["task", "metric", "learning rate", "seeds", "best", "mean", "median", "std"]


class GlueResult(NamedTuple):
    """The result of a finished run."""

    task: str
    metric: str  # the reported one; for MNLI, on the matched development set
    learning_rate: float
    seed: int
    folder: str
    update: int  # update of the best checkpoint
    metrics: dict[str, float]  # by name, in percent
    collapsed: bool  # predicts NaN, the same for everything, or scores exactly at chance


def write_results(
    runs: Sequence[GlueRun], out: Path, pretrained: Pretrained, protocol: str
) -> Record:
    """Write the results and the submission of a folder's finished runs; return the record."""
    finished = [run for run in runs if (run.folder(out) / RESULT).exists()]  # and evaluated
    results = []
    for run in finished:
        folder = run.folder(out)
        metric = f"{run.metric}_m" if len(TASKS[run.task].valid_splits) > 1 else run.metric
        described = run.task, metric, run.learning_rate, run.seed, str(folder)  # the first fields
        results.append(GlueResult(*described, **read_json(folder / RESULT)))  # update, metrics, ...
    for name in {*SUBMISSION} - {WNLI.name}:  # of earlier calls, whose runs may be gone by now
        (out / "submission" / f"{name}.tsv").unlink(missing_ok=True)
    for group in group_by_task(results):
        for path in sorted(Path(find_best(group).folder).glob("submission/*.tsv")):  # predictions
            (out / "submission").mkdir(exist_ok=True)
            shutil.copyfile(path, out / "submission" / path.name)
    facts = {
        "name": name_model(pretrained.path),
        "checkpoint": str(pretrained.path),
        "attention_directions": pretrained.model_options.get("attention_directions", ""),
        "protocol": protocol,
        "unfinished": "; ".join(run.label for run in runs if run not in finished),
    }
    record = build_record(results, str(pretrained.spec), facts)
    record.write(out / "results.json")
    write_whole(out / "results.md", format_report(record))
    return record


def name_model(path: Path) -> str:
    """Name a model by its folder, and by its file too unless this is ``checkpoint_best.pt``."""
    folder = path.parent.name
    return folder if path.name == BEST else f"{folder}-{path.stem}"


def group_by_task(results: Sequence[GlueResult]) -> list[list[GlueResult]]:
    """Group results by task, in the order of :data:`TASKS`."""
    groups = group_by(results, lambda result: result.task)
    return [groups[task] for task in TASKS if task in groups]


def build_record(results: Sequence[GlueResult], spec: str, facts: Mapping[str, Any]) -> Record:
    """Build the record of all results; ``facts`` are about the model, whose spec is ``spec``."""
    figures: dict[str, list[Row]] = {"tasks": [], "runs": []}
    for group in group_by_task(results):
        by_rate = group_by(group, lambda result: result.learning_rate).values()
        # The seeds of the learning rate with the best mean of the reported metric.
        selected = max(by_rate, key=lambda x: statistics.fmean(y.metrics[y.metric] for y in x))
        best = find_best(group)
        for name in best.metrics:
            row = {"task": best.task, "metric": name, "reported": name == best.metric}
            figures["tasks"].append({**row, **_summarize_seeds(selected, name, best)})
        for result in group:
            row = {**result._asdict(), **result.metrics}
            del row["metric"], row["metrics"]
            figures["runs"].append(row)
    return Record("glue", figures, facts, spec, command=own_command())


def find_best(results: Sequence[GlueResult]) -> GlueResult:
    """Find the best result of a task, of all learning rates and seeds."""
    return max(results, key=lambda result: result.metrics[result.metric])


def _summarize_seeds(results: Sequence[GlueResult], metric: str, best: GlueResult) -> Row:
    """Compute mean, median and sample deviation (0 for one) over seeds; add ``best``'s figure."""
    values = [result.metrics[metric] for result in results]
    return {
        "learning_rate": results[0].learning_rate,
        "seeds": len(values),
        "best": best.metrics[metric],
        "mean": statistics.fmean(values),
        "median": statistics.median(values),
        "std": statistics.stdev(values) if len(values) > 1 else 0.0,
    }


def format_report(record: Record) -> str:
    """Format a record of :func:`build_record`; its ``data`` are the facts about the model."""
    data, tasks = record.data, record.figures["tasks"]
    figures = select_figures(record)  # by column of the first table, with the average
    parts = [
        f"# GLUE: {data['name']}",
        f"Positions `{record.spec}`, protocol {data['protocol']}, checkpoint "
        f"`{data['checkpoint']}`. All figures are percentages, on the development sets.",
        table(
            [STATISTIC_TITLES[data["protocol"]], *figures],
            [[f"**{data['name']}**", *(f"{figure:.2f}" for figure in figures.values())]],
        ),
        "## Learning rates and seeds",
        "All runs count for `best`; the other figures are of the learning rate with the best mean.",
        table(_SPREAD_COLUMNS, [_format_spread(x) for x in tasks if x["reported"]], align="l"),
    ]
    if collapsed := [f"- `{run['folder']}`" for run in record.figures["runs"] if run["collapsed"]]:
        text = "(they predict NaN, the same for everything, or score exactly at chance)"
        parts += [f"Collapsed runs {text}, which the figures above include:", "\n".join(collapsed)]
    if data["unfinished"]:
        parts.append(f"Not finished: {data['unfinished']}.")
    return "\n\n".join(parts) + "\n"


def _format_spread(row: Row) -> list[str]:
    """Format the spread of a task's reported metric over the seeds."""
    values = [f"{row[key]:.2f}" for key in ("best", "mean", "median")]  # in percent
    values.append(f"{row['std']:.2f}" if row["seeds"] > 1 else "-")
    name, _, split = row["metric"].partition("_")  # only metrics of MNLI have a split, m or mm
    metric = f"{_METRIC_TITLES.get(name, name)} {split}".strip()
    return [row["task"], metric, f"{row['learning_rate']:g}", str(row["seeds"]), *values]


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
    """Format the outputs ``(N, C)`` as labels or, for STS-B, as scores from 0 to 5."""
    if task.regression:
        scores = (outputs.view(-1) * SCORE_MAXIMUM).clamp(0, SCORE_MAXIMUM)  # trained on 0 to 1
        return [f"{score:.3f}" for score in scores.tolist()]
    return [task.classes[label] for label in outputs.argmax(-1).tolist()]
