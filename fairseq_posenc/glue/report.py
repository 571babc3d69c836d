"""``results.md``: the figures beside those of the paper, and every run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fairseq_posenc.recipes.reported import Reported, reported
from fairseq_posenc.reporting.markdown import table
from fairseq_posenc.tasks.glue.definitions import TASKS

_METRICS = {
    "accuracy": "accuracy",
    "f1": "F1",
    "matthews": "Matthews",
    "pearson": "Pearson",
    "spearman": "Spearman",
}
# The paper's way: the best over the learning rates, or the mean over the seeds.
_REPORTED = {"m4m": "best", "decbert": "mean"}


def report(results: dict[str, Any]) -> str:
    """Return the text of the report.

    Args:
        results: the contents of ``results.json``.
    """
    protocol, tasks = results["protocol"], results["tasks"]
    lines = [
        f"# GLUE: {results['name']}",
        "",
        f"Positions `{results['position_encoding']}`, protocol {protocol}, checkpoint "
        f"`{results['checkpoint']}`. All figures are percentages of the development sets.",
        "",
        *_beside_the_paper(results),
        "",
        "## Learning rates and seeds",
        "",
        "Of the learning rate with the best mean: its seeds. `best` is over all runs.",
        "",
        table(_SPREAD_HEAD, [row for t in tasks for row in _spread_rows(t, tasks[t])], "l"),
        "",
        *_collapsed(tasks),
        "## All runs",
    ]
    for name, entry in tasks.items():
        lines += ["", f"### {name}", "", _runs(entry)]
    for label in results["unfinished"]:
        lines += ["", f"Not finished: {label}."]
    return "\n".join(lines) + "\n"


def _beside_the_paper(results: dict[str, Any]) -> Iterator[str]:
    protocol, tasks = results["protocol"], results["tasks"]
    how, columns = _REPORTED[protocol], _columns(tasks)
    ours = [f"**{results['name']}** ({_described(how, tasks)})"]
    ours += [f"{figures[how][key]:.2f}" for key, figures in columns.values()]
    head = ["", *(f"{name} ({_metric(key).split()[0]})" for name, (key, _) in columns.items())]
    rows, notes = [ours], []
    for theirs in _paper_tables(protocol):
        if not columns.keys() & theirs.columns.keys():
            continue
        for row in theirs.rows:
            values = [row["values"].get(name) for name in columns]
            shown = ["" if value is None else f"{value:.2f}" for value in values]
            label = f"{row['name']}, `{row['position_encoding']}`, {theirs.where}"
            rows.append([label, *shown])
        notes += [f"{theirs.where.capitalize()}: {theirs.note}"] if theirs.note else []
    yield table(head, rows, "l")
    for note in notes:
        yield from ("", note)


def _columns(tasks: dict[str, Any]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return, by the paper's name of a column, the metric and figures of ours."""
    columns = {}
    for name, entry in tasks.items():
        (best,) = [run for run in entry["runs"] if run["folder"] == entry["best_run"]]
        figures = {
            "best": best["metrics"],
            "mean": {key: value["mean"] for key, value in entry["statistics"].items()},
        }
        two = len(TASKS[name].valid_splits) > 1
        keys = [entry["metric"], f"{entry['metric']}m"] if two else [entry["metric"]]
        for column, key in zip(TASKS[name].submission, keys):
            columns[column] = (key, figures)
    return columns


def _paper_tables(protocol: str) -> list[Reported]:
    """Return the paper's tables of development sets of GLUE."""
    return [
        theirs
        for theirs in reported().values()
        if theirs.source == protocol
        and all(split == "dev" for _, _, split in theirs.columns.values())
    ]


def _described(how: str, tasks: dict[str, Any]) -> str:
    if how == "best":
        return "best run"
    seeds = sorted({entry["seeds"] for entry in tasks.values()})
    return f"mean of {' or '.join(map(str, seeds))} seeds"


_SPREAD_HEAD = ["task", "metric", "learning rate", "seeds", "best", "mean", "median", "std"]


def _spread_rows(name: str, entry: dict[str, Any]) -> Iterator[list[str]]:
    def figures(of: dict[str, Any], best: float) -> list[str]:
        std = f"{of['std']:.2f}" if of["seeds"] > 1 else "-"
        return [str(of["seeds"]), f"{best:.2f}", f"{of['mean']:.2f}", f"{of['median']:.2f}", std]

    start = [name, _metric(entry["metric"]), f"{entry['lr']:g}"]
    yield [*start, *figures(entry, entry["best"])]
    upright = entry["without_collapsed"]
    if upright and upright["seeds"] < entry["seeds"]:
        start[0] = f"{name}, without collapsed runs"
        yield [*start, *figures(upright, upright["best"])]


def _collapsed(tasks: dict[str, Any]) -> list[str]:
    folders = [folder for entry in tasks.values() for folder in entry["collapsed"]]
    if not folders:
        return []
    text = "Collapsed (the same prediction for everything, or no better than chance), and counted "
    return [f"{text}in the figures above:", "", *(f"- `{folder}`" for folder in folders), ""]


def _runs(entry: dict[str, Any]) -> str:
    names = list(entry["runs"][0]["metrics"])
    head = ["learning rate", "seed", "best at update", *map(_metric, names), ""]
    rows = [
        [
            *(f"{run['lr']:g}", str(run["seed"]), f"{run['update']:,}"),
            *(f"{run['metrics'][name]:.2f}" for name in names),
            "collapsed" if run["collapsed"] else "",
        ]
        for run in entry["runs"]
    ]
    return table(head, rows, "l")


def _metric(key: str) -> str:
    name, _, which = key.partition("_")
    return f"{_METRICS[name]} {which}".strip()
