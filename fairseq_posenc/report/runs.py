"""Runs and their figures, from files of results."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any, NamedTuple, Optional

from fairseq_posenc.report.logs import Figure
from fairseq_posenc.report.training import PRETRAINING, Training, read


class Run(NamedTuple):
    """Figures of one model.

    Attributes:
        name: what the report calls it.
        kind: ``pre-training``, ``training`` (translation), ``glue``, ``glue-test``, ``squad`` or
            ``bleu``.
        path: the file or folder that it is from.
        recipe: the paper's set-up that it stands for.
        encoding: its position encodings, None if not known.
        directions: what its layers see, as in ``lr,rl``; None if not known.
        figures: in percent, or a perplexity.
        training: its pre-training, None if its checkpoint is not there any more.
        notes: what a reader has to know of the figures.
        content: of the file of results.
    """

    name: str
    kind: str
    path: Path
    recipe: str
    encoding: Optional[str]
    directions: Optional[str]
    figures: dict[Figure, float]
    training: Optional[Training]
    notes: list[str]
    content: dict[str, Any]

    @property
    def model(self) -> str:
        """What is the same for two runs of one pre-trained model."""
        if self.training is None:
            return self.name
        path = self.training.path
        return str(path.parent if path.name.startswith("checkpoint") else path)


def _glue(path: Path, content: dict[str, Any], recipe: Optional[str]) -> Run:
    mean = content["protocol"] == "decbert"
    figures: dict[Figure, float] = {}
    notes = []
    for task, entry in content["tasks"].items():
        chosen = (_best_rate if mean else _best_run)(entry["runs"], entry["metric"])
        for metric in chosen[0]["metrics"]:
            value = statistics.fmean(run["metrics"][metric] for run in chosen)
            figures[_figure(task, metric, "dev")] = value
        collapsed = sum(run["collapsed"] for run in entry["runs"])
        if collapsed:
            notes.append(f"{task}: {collapsed} of {len(entry['runs'])} runs collapsed")
    if content.get("unfinished"):
        notes.append(f"not finished: {', '.join(content['unfinished'])}")
    return _evaluation(path, content, "b_small" if mean else None, recipe, figures, notes)


def _figure(task: str, metric: str, split: str) -> Figure:
    """Return the column's key; MNLI's two development sets are columns of their own."""
    stem, _, part = metric.rpartition("_")
    return (f"{task}-{part}", stem, split) if part in ("m", "mm") else (task, metric, split)


def _best_run(runs: list[dict[str, Any]], metric: str) -> list[dict[str, Any]]:
    return [max(runs, key=lambda run: run["metrics"][metric])]


def _best_rate(runs: list[dict[str, Any]], metric: str) -> list[dict[str, Any]]:
    """Return the runs, one a seed, of the learning rate where their mean is best."""
    by_rate: dict[float, list[dict[str, Any]]] = {}
    for run in runs:
        by_rate.setdefault(run["lr"], []).append(run)
    return max(
        by_rate.values(), key=lambda group: statistics.fmean(r["metrics"][metric] for r in group)
    )


def _glue_test(path: Path, content: dict[str, Any], recipe: Optional[str]) -> Run:
    figures: dict[Figure, float] = {
        (task, metric, "test"): float(value)
        for task, metrics in content["scores"].items()
        for metric, value in metrics.items()
    }
    return _evaluation(path, content, "b_large", recipe, figures, [])


def _squad(path: Path, content: dict[str, Any], recipe: Optional[str]) -> Run:
    task = f"SQuAD{content['version']}"
    figures: dict[Figure, float] = {
        (task, metric, "dev"): float(content[metric]) for metric in ("exact", "f1")
    }
    return _evaluation(path, content, None, recipe, figures, [])


# By kind: from the file, its contents, and the user's recipe.
READERS = {"glue": _glue, "glue-test": _glue_test, "squad": _squad}


def _evaluation(
    path: Path,
    content: dict[str, Any],
    usual: Optional[str],
    recipe: Optional[str],
    figures: dict[Figure, float],
    notes: list[str],
) -> Run:
    training = read_if_there(content.get("checkpoint"), path)
    directions, encoding = content.get("attention_directions"), content.get("position_encoding")
    if training is not None:
        directions = training.directions if directions is None else directions
        encoding = encoding or training.encoding
        if training.task not in PRETRAINING:  # a fine-tuned model
            training = read_if_there(training.start, path)
    return Run(
        str(content.get("name") or path.stem),
        content["kind"],
        path,
        recipe or usual or _recipe_of_m4m(training),
        encoding,
        directions,
        figures,
        training,
        notes,
        content,
    )


def read_if_there(checkpoint: Any, path: Path) -> Optional[Training]:
    """Read a checkpoint, whose path is relative to here or to the file that names it."""
    if checkpoint is None:
        return None
    places = (Path(checkpoint), path.parent / checkpoint)
    found = next((place for place in places if place.is_file()), None)
    return None if found is None else read(found)


def _recipe_of_m4m(training: Optional[Training]) -> str:
    """Return the M4M paper's set-up that is the nearest."""
    if training is not None and training.large:
        return "a_large"
    trained_on = training is not None and (training.released or training.start)
    return "a_base" if trained_on else "a_small"
