"""Defines the criterion ``squad``: cross-entropy of an answer's first and last token."""

import math
from typing import Any

import torch.nn.functional as F
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.logging import metrics
from torch import Tensor

_SIDES = ("start", "end")


@register_criterion("squad")
class SquadCriterion(FairseqCriterion):
    """The mean of the losses of start and end, as in BERT, summed over windows.

    The model returns the scores of both, -inf for padding. In a window without the answer, the
    target of both is ``<s>``, at index 0.
    """

    def forward(self, model: Any, sample: Any) -> tuple[Tensor, int, dict[str, Tensor | int]]:
        """Compute the summed loss, the number of windows, and the values to log, all sums."""
        windows = len(sample["starts"])
        logged = {"ntokens": sample["ntokens"], "nsentences": windows, "sample_size": windows}
        losses = []
        for name, scores in zip(_SIDES, model(**sample["net_input"], span_scores=True)):
            target = sample[f"{name}s"]  # `starts` or `ends`, [B]; of scores [B, T]
            losses.append(F.cross_entropy(scores, target, reduction="sum"))
            logged[f"{name}_correct"] = (scores.argmax(-1) == target).sum()
        loss = (losses[0] + losses[1]) / 2
        return loss, windows, {**logged, "loss": loss.detach()}

    @staticmethod
    def reduce_metrics(logging_outputs: list[dict[str, Tensor | int]]) -> None:
        """Log the loss, in bits as everywhere in fairseq, and the accuracies."""

        def total(name: str) -> Any:
            return sum(log.get(name, 0) for log in logging_outputs)

        windows = total("sample_size")
        metrics.log_scalar("loss", total("loss") / windows / math.log(2), windows, round=3)
        for name in _SIDES:
            correct = 100.0 * total(f"{name}_correct") / windows
            metrics.log_scalar(f"{name}_accuracy", correct, windows, round=1)

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        """Confirm that all logged values are sums."""
        return True
