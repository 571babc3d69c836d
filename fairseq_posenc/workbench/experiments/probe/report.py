"""Reports a probe: shares of right answers and ranks, as tables, sentences and a record."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from fairseq_posenc.files import write_whole
from fairseq_posenc.workbench.experiments.outcomes import Outcome
from fairseq_posenc.workbench.experiments.probe.data import DEPTHS, TEST_EXAMPLES
from fairseq_posenc.workbench.experiments.probe.experiment import TaskResults
from fairseq_posenc.workbench.experiments.probe.tasks import TASKS
from fairseq_posenc.workbench.experiments.variants import Variant
from fairseq_posenc.workbench.results import differences, markdown
from fairseq_posenc.workbench.results.intervals import INTERVAL_NOTE, Interval, interval_of_share
from fairseq_posenc.workbench.results.record import Record, own_command
from fairseq_posenc.workbench.running.progress import format_time

_SHARE = differences.Scale("share of right answers", higher_is_better=True)
REPORT, RECORD = "probe.md", "probe.json"
PICTURE, LEARNING = "probe.png", "probe-learning.png"
DEPTH_PICTURES = {name: f"probe-{name}.png" for name, task in TASKS.items() if task.has_depth}
FILES = (REPORT, RECORD, PICTURE, LEARNING, *DEPTH_PICTURES.values())  # all results of a probe


def mean_share(results: TaskResults, task: str, model: Variant, lengths: Sequence[int]) -> Interval:
    """Compute the share of right answers, the mean over ``lengths``, over the seeds."""
    return interval_of_share(share_by_seed(results, task, model, lengths).values())


def share_by_seed(
    results: TaskResults, task: str, model: Variant, lengths: Sequence[int]
) -> dict[int, float]:
    """Compute the share of right answers, the mean over ``lengths``, for each seed."""
    return {
        outcome.run.seed: fmean(read_share(outcome, length) for length in lengths)
        for outcome in select_outcomes(results, task, model)
    }


def share_at_depth(
    results: TaskResults, task: str, model: Variant, length: int, depth: float
) -> Interval:
    """Compute the share of right answers at a length and a depth of the needle, over the seeds."""
    outcomes = select_outcomes(results, task, model)
    return interval_of_share(read_share(outcome, f"{length}@{depth:g}") for outcome in outcomes)


def select_outcomes(results: TaskResults, task: str, model: Variant) -> list[Outcome]:
    """Select the outcomes of a model's trainings on a task, one for each seed."""
    runs = ((outcome, outcome.run) for outcome in results.outcomes)
    return [outcome for outcome, run in runs if (run.condition, run.variant) == (task, model)]


def read_share(outcome: Outcome, place: int | str) -> float:
    """Read the share of right answers at a length, or a length and depth; 0 if it diverged."""
    return 0.0 if outcome.diverged_at else outcome.figures[str(place)]


def learning_curve(outcome: Outcome) -> list[tuple[int, float]]:
    """List the updates and shares of right answers of a training's validations."""
    entries = outcome.curve.entries
    return [(entry.updates, entry.exact) for entry in entries if entry.exact is not None]


def reciprocal_ranks(results: TaskResults) -> dict[Variant, Interval]:
    """Compute each model's mean over tasks of 1 / rank beyond the trained length, over the seeds.

    For each task and seed, models are ranked by their share of right answers; models with the same
    share get the mean of their ranks. After Kazemnejad et al. (2023, arXiv:2305.19466).
    """
    from scipy.stats import rankdata  # takes a second to import

    experiment = results.experiment
    models, tasks, beyond = experiment.variants, experiment.tasks, experiment.beyond
    shares = [
        [[*share_by_seed(results, task.name, model, beyond).values()] for model in models]
        for task in tasks
    ]
    ranks = rankdata(-np.array(shares), axis=1)  # [tasks, models, seeds]; the highest has rank 1
    means = (1 / ranks).mean(axis=0).tolist()
    return {model: interval_of_share(by_seed) for model, by_seed in zip(models, means)}


def write_report(results: TaskResults, pictures: Mapping[str, str]) -> Path:
    """Write the report with ``pictures``, which are file names by title; return its path."""
    parts = ["# Tasks with known answers", _introduce(results), format_tables(results)]
    parts += [f"![{title}]({name})" for title, name in pictures.items()]
    path = results.experiment.out / REPORT
    write_whole(path, "\n\n".join([*parts, f"```sh\n{own_command()}\n```"]) + "\n")
    return path


def _introduce(results: TaskResults) -> str:
    experiment = results.experiment
    durations = [outcome.seconds for outcome in results.outcomes if not outcome.diverged_at]
    duration = format_time(fmean(durations)) if durations else "-"
    return (
        f"Models ({experiment.family}), each trained on one task for {experiment.updates:,} "
        f"updates with questions of up to {experiment.trained} words, once for each seed "
        f"({', '.join(map(str, experiment.seeds))}) on one thread ({duration} on average), and "
        f"tested on {TEST_EXAMPLES} questions of each length: "
        f"{', '.join(map(str, experiment.lengths))}. Shares count the questions whose whole answer "
        f"is right under greedy search, with intervals ({INTERVAL_NOTE}). {differences.TEST_NOTE}"
    )


def format_tables(results: TaskResults) -> str:
    """Format all tables and sentences."""
    experiment = results.experiment
    parts = []
    if experiment.within:
        parts += ["Lengths as in training:", _format_shares(results, experiment.within)]
    if experiment.beyond:
        parts += [
            "Longer than in training, and the mean over tasks of 1 / rank there (Kazemnejad et al. "
            "2023):",
            _format_shares(results, experiment.beyond, ranks=True),
            "\n".join(f"- {_describe_best(results, task.name)}" for task in experiment.tasks),
            differences.explain_few_seeds(len(experiment.seeds)) or "",
        ]
    return "\n\n".join(filter(None, parts))


def _format_shares(results: TaskResults, lengths: Sequence[int], *, ranks: bool = False) -> str:
    tasks = [task.name for task in results.experiment.tasks]
    header = ["encoding", "mean reciprocal rank", *tasks] if ranks else ["encoding", *tasks]
    reciprocals = reciprocal_ranks(results) if ranks else {}
    rows = []
    for model in results.experiment.variants:
        columns = [reciprocals[model]] if ranks else []
        columns += [mean_share(results, task, model, lengths) for task in tasks]
        rows.append([markdown.code(model.name), *(column.show(2) for column in columns)])
    return markdown.table(header, rows)


def _describe_best(results: TaskResults, task: str) -> str:
    """Describe the best model of a task, and which models differ significantly from it."""
    models, beyond = results.experiment.variants, results.experiment.beyond
    by_seed = {model: share_by_seed(results, task, model, beyond) for model in models}
    means = {model: fmean(shares.values()) for model, shares in by_seed.items()}
    best = max(models, key=lambda model: means[model])
    pairs = {
        model.name: differences.compare(by_seed[best], by_seed[model], _SHARE)
        for model in models
        if model != best
    }
    below = [name for name, pair in pairs.items() if pair.is_significant]
    same = [name for name, pair in pairs.items() if pair.is_judged and not pair.is_significant]
    sentence = f"{task}: {markdown.code(best.name)} is right in {means[best]:.0%}"
    if below:
        sentence += f", significantly above {markdown.join_codes(below)}"
    if same:
        sentence += f", not significantly different from {markdown.join_codes(same)}"
    return f"{sentence}."


def build_record(results: TaskResults) -> Record:
    """Build the record: figures by model, task and length, ranks, trainings and their curves."""
    experiment = results.experiment
    lengths = [
        {
            "model": variant.name,
            "position_encoding": variant.position_encoding,
            "attention_directions": variant.directions,
            "task": task.name,
            "length": length,
            "seeds": len(experiment.seeds),
            **mean_share(results, task.name, variant, [length]).figures("exact"),
        }
        for task in experiment.tasks
        for variant in experiment.variants
        for length in experiment.lengths
    ]
    depths = [
        {
            "model": variant.name,
            "task": task.name,
            "length": length,
            "depth": depth,
            **share_at_depth(results, task.name, variant, length, depth).figures("exact"),
        }
        for task in experiment.tasks
        if task.has_depth
        for variant in experiment.variants
        for length in experiment.lengths
        for depth in DEPTHS
    ]
    ranks = [
        {"model": variant.name, **interval.figures("mean_reciprocal_rank")}
        for variant, interval in (reciprocal_ranks(results) if experiment.beyond else {}).items()
    ]
    trainings = [
        {
            **_name_training(outcome),
            **{f"length_{length}": read_share(outcome, length) for length in experiment.lengths},
            "seconds": outcome.seconds,
        }
        for outcome in results.outcomes
    ]
    curves = [
        {**_name_training(outcome), "updates": updates, "exact": exact}
        for outcome in results.outcomes
        for updates, exact in learning_curve(outcome)
    ]
    data = {
        "family": experiment.family,
        "updates": experiment.updates,
        "trained": experiment.trained,
    }
    if experiment.train_args:
        data["options"] = shlex.join(experiment.train_args)
    figures = {"lengths": lengths, "ranks": ranks, "trainings": trainings, "curves": curves}
    if depths:
        figures["depths"] = depths
    return Record("probe", figures, data, command=own_command())


def _name_training(outcome: Outcome) -> dict[str, Any]:
    run = outcome.run
    return {"model": run.variant.name, "task": run.condition, "seed": run.seed}
