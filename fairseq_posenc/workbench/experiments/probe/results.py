"""What the outcomes say: shares over seeds, ranks over tasks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import NamedTuple

from fairseq_posenc.workbench.experiments.probe.pipeline import Outcome
from fairseq_posenc.workbench.experiments.probe.settings import Settings
from fairseq_posenc.workbench.results.intervals import Interval, interval_of_share


class Results(NamedTuple):
    """What came out of a probe.

    Attributes:
        settings: the user's choices.
        outcomes: one for each training.
    """

    settings: Settings
    outcomes: Sequence[Outcome]

    @property
    def models(self) -> list[str]:
        """The models' names, in the user's order."""
        return [contender.name for contender in self.settings.contenders]

    @property
    def within(self) -> list[int]:
        """The lengths read that were trained on."""
        return [length for length in self.settings.lengths if length <= self.settings.trained]

    @property
    def beyond(self) -> list[int]:
        """The lengths read beyond."""
        return [length for length in self.settings.lengths if length > self.settings.trained]

    def exact(self, task: str, model: str, lengths: Iterable[int]) -> Interval:
        """Compute the share of right answers, the mean over lengths, over the seeds."""
        return interval_of_share(self.by_seed(task, model, list(lengths)).values())

    def by_seed(self, task: str, model: str, lengths: Sequence[int]) -> dict[int, float]:
        """Compute the same for each seed."""
        return {
            outcome.seed: fmean(outcome.exact[length] for length in lengths)
            for outcome in self.outcomes
            if (outcome.task, outcome.contender.name) == (task, model)
        }

    def reciprocal_rank(self, model: str) -> Interval:
        """Return the mean over tasks of 1 / rank beyond the trained length, over the seeds.

        For each task and seed the models are ranked by their share of right answers; those with
        the same one share the mean of their ranks. After Kazemnejad et al. (2023,
        arXiv:2305.19466).
        """
        return interval_of_share(
            fmean(1 / self._ranks(task.name, seed)[model] for task in self.settings.tasks)
            for seed in self.settings.seeds
        )

    def _ranks(self, task: str, seed: int) -> dict[str, float]:
        shares = {
            outcome.contender.name: fmean(outcome.exact[length] for length in self.beyond)
            for outcome in self.outcomes
            if (outcome.task, outcome.seed) == (task, seed)
        }
        return {model: mean_rank(share, shares.values()) for model, share in shares.items()}


def mean_rank(value: float, values: Iterable[float]) -> float:
    """Return the rank of a value among all, from 1 for the highest; equal ones share their mean."""
    values = list(values)
    higher, same = sum(each > value for each in values), values.count(value)
    return higher + (same + 1) / 2
