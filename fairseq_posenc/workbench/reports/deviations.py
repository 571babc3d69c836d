"""Lists the settings in which a user's runs differ from the paper's."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any, Optional

from fairseq_posenc.workbench.reports.checkpoint_facts import CheckpointFacts
from fairseq_posenc.workbench.reports.user_runs import UserRun, find_training
from fairseq_posenc.workbench.training import recipes

# Options that the kind of run fixes, or that have a line of their own.
_NOT_COMPARED = {"task", "criterion", "max_update", "total_num_update", "seed"}


def list_deviations(runs: Sequence[UserRun]) -> list[str]:
    """List the differences between the settings of a model's runs and the paper's.

    Settings that the files of the runs do not contain are listed as not known; data and seeds are
    always listed, for the reader to compare.
    """
    training = find_training(runs)
    recipe = recipes.build_recipe(runs[0].recipe)
    if training is None:
        lines = ["the settings of its training are unknown: the checkpoint is missing"]
    elif recipe.name == recipes.TRANSLATION:
        lines = _compare_translation(training, recipe)
    else:
        lines = _compare_pretraining(training, recipe)
    for run in runs:
        lines += [*_compare_fine_tuning(run), *run.notes]
    return list(dict.fromkeys(lines))


def _compare_pretraining(training: CheckpointFacts, recipe: recipes.Recipe) -> list[str]:
    """List the differences between a pre-training and its recipe."""
    settings, paper = training.settings, recipe.settings
    data = recipes.load()["pretraining"][recipe.name]["data"]["name"]
    start = str(training.start or "random")
    lines = [f"data: {settings.get('data', 'not known')} (paper: {data})"]
    if start != recipe.init:
        lines.append(f"start: {start} (paper: {recipe.init})")
    if training.updates != paper["max_update"]:
        lines.append(f"updates: {training.updates:,} (paper: {paper['max_update']:,})")
    batch = _format_batch(settings)
    if batch != f"{recipe.batch:,} sequences":
        lines.append(f"batch: {batch} (paper: {recipe.batch:,} sequences)")
    lines += _compare_settings(settings, paper)
    lines.append(f"seed: {settings.get('seed', 'not known')} (paper: {paper.get('seed', '-')})")
    return lines


def _compare_settings(settings: dict[str, Any], paper: dict[str, Any]) -> list[str]:
    """List the options of fairseq whose values differ from the paper's."""
    lines = []
    for name in sorted(paper.keys() - _NOT_COMPARED):
        if name not in settings or _normalize(settings[name]) != _normalize(paper[name]):
            ours = _format(settings[name]) if name in settings else "not known"
            lines.append(f"{name}: {ours} (paper: {_format(paper[name])})")
    return lines


def _compare_translation(training: CheckpointFacts, recipe: recipes.Recipe) -> list[str]:
    """List the differences between a training of a translation model and the paper's."""
    settings = training.settings
    return [
        f"data: {settings.get('data', 'not known')} (paper: IWSLT 2017, French to English)",
        f"updates: {training.updates:,}, batch: {_format_batch(settings)} (paper: not given)",
        *_compare_settings(settings, recipe.settings),
        f"seed: {settings.get('seed', 'not known')} (paper: the best of 3 runs)",
    ]


def _format_batch(settings: dict[str, Any]) -> str:
    """Format the batch of an update on all GPUs; fairseq uses the smaller of two limits."""
    steps = settings.get("update_freq") or [1]  # a number for each epoch
    batches = steps[0] if isinstance(steps, list) else steps
    batches *= settings.get("distributed_world_size") or 1
    units = {"batch_size": "sequences", "max_tokens": "tokens"}
    limits = [f"{settings[key] * batches:,} {units[key]}" for key in units if settings.get(key)]
    return " or ".join(limits) or "not known"


def _compare_fine_tuning(run: UserRun) -> list[str]:
    """List the learning rates and seeds of fine-tuning on GLUE that are not the paper's."""
    if run.kind != "glue" or run.record is None:
        return []
    recipe = recipes.load()["finetuning"]["glue"].get(run.record.data["protocol"], {})
    rows = run.record.figures["runs"]  # a row for each learning rate and seed of each task
    lines = []
    for task in dict.fromkeys(row["task"] for row in rows):
        settings = {**recipe.get("settings", {}), **recipe.get("per_task", {}).get(task, {})}
        papers = {"learning_rate": settings.get("lr"), "seed": settings.get("seeds")}
        for column, paper in papers.items():
            ours = sorted({row[column] for row in rows if row["task"] == task})
            if paper is None or ours != sorted(paper):
                name = f"{column.replace('_', ' ')}s"
                lines.append(f"{task}, {name}: {_join(ours)} (paper: {_join(paper)})")
    return lines


def _join(values: Optional[Sequence[float]]) -> str:
    return "-" if values is None else ", ".join(f"{value:g}" for value in values)


def _format(value: Any) -> str:
    return str(value[0]) if isinstance(value, list) and len(value) == 1 else str(value)


def _normalize(value: Any) -> Any:
    """Convert sequences to tuples: fairseq stores them as text, lists or tuples."""
    if isinstance(value, str) and value[:1] in "([":
        value = ast.literal_eval(value)
    return tuple(value) if isinstance(value, (list, tuple)) else value
