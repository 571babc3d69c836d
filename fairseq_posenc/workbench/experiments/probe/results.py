"""Figures of a probe: shares of right answers over seeds, ranks over tasks."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from fairseq_posenc.workbench.experiments.experiment import Results
from fairseq_posenc.workbench.experiments.outcomes import Outcome
from fairseq_posenc.workbench.experiments.probe.settings import TaskSettings
from fairseq_posenc.workbench.experiments.variants import Variant
from fairseq_posenc.workbench.results.intervals import Interval, interval_of_share

TaskResults = Results[TaskSettings]


def share(results: TaskResults, task: str, model: Variant, lengths: Sequence[int]) -> Interval:
    """Compute the share of right answers, the mean over lengths, over the seeds."""
    return interval_of_share(share_by_seed(results, task, model, lengths).values())


def share_at_depth(
    results: TaskResults, task: str, model: Variant, length: int, depth: float
) -> Interval:
    """Compute the share of right answers at a depth, over the seeds."""
    return interval_of_share(results.by_seed(f"{length}@{depth:g}", model, task).values())


def tasks_with_depths(results: TaskResults) -> list[str]:
    """Name the tasks that are read at several depths."""
    return [task.name for task in results.settings.tasks if task.has_depth]


def share_by_seed(
    results: TaskResults, task: str, model: Variant, lengths: Sequence[int]
) -> dict[int, float]:
    """Compute the share of right answers, the mean over lengths, for each seed."""
    shares = [results.by_seed(str(length), model, task) for length in lengths]
    return {seed: fmean(each[seed] for each in shares) for seed in shares[0]}


def learning_curve(outcome: Outcome) -> list[tuple[int, float]]:
    """List the updates and shares of right answers of a training's validations."""
    entries = outcome.curve.entries
    return [(each.updates, each.exact) for each in entries if each.exact is not None]


def reciprocal_rank(results: TaskResults, model: Variant) -> Interval:
    """Compute the mean over tasks of 1 / rank beyond the trained length, over the seeds.

    For each task and seed the models are ranked by their share of right answers; those with
    the same one share the mean of their ranks. After Kazemnejad et al. (2023,
    arXiv:2305.19466).
    """
    from scipy.stats import rankdata  # a second to import

    settings = results.settings
    number = settings.variants.index(model)
    by_task = [
        [share_by_seed(results, task.name, other, settings.beyond) for other in settings.variants]
        for task in settings.tasks
    ]
    return interval_of_share(
        fmean(1 / rankdata([-share[seed] for share in shares])[number] for shares in by_task)
        for seed in settings.seeds
    )
