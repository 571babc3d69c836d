"""fairseq's criterion for questions with one right answer: only the answer counts.

It serves fairseq's own tasks ``language_modeling`` and ``translation``.
"""

from __future__ import annotations

import math
from typing import Any

import torch.nn.functional as F
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.logging import metrics
from torch import Tensor

from fairseq_posenc.errors import UserError

ASKS = "="  # the symbol after which the answer comes


@register_criterion("answers")
class AnswersCriterion(FairseqCriterion):
    """The cross-entropy of what comes after ``=``, and how often all of it is right.

    Each token of an answer is predicted from the right ones before it. All are the likeliest ones
    exactly when greedy search, which sees its own, finds the whole answer: so this is its exact
    match.
    """

    def __init__(self, task: Any) -> None:
        super().__init__(task)
        dictionary = task.target_dictionary
        self._asks, self._pad = dictionary.index(ASKS), dictionary.pad()
        if self._asks == dictionary.unk():
            raise UserError(f"--criterion answers: the dictionary has no {ASKS!r}")

    def forward(
        self, model: Any, sample: dict[str, Any], reduce: bool = True
    ) -> tuple[Tensor, int, dict[str, Any]]:
        """Return the loss, the number of tokens it is to be divided by, and what is logged.

        The logged values are sums, so that those of several ranks can be added.
        """
        scores = model(**sample["net_input"])[0].float()  # [B, T, V]
        target = sample["target"]  # [B, T]
        counted = self.counted(sample)
        loss = F.cross_entropy(scores[counted], target[counted], reduction="sum")
        wrong = ((scores.argmax(-1) != target) & counted).any(-1)  # [B]
        tokens = int(counted.sum())
        logged = {
            "loss": loss.detach(),
            "ntokens": sample["ntokens"],
            "nsentences": len(target),
            "sample_size": tokens,
            "exact": len(target) - wrong.sum(),
        }
        return loss, tokens, logged

    def counted(self, sample: dict[str, Any]) -> Tensor:
        """Return which tokens to be predicted are the answer's, its end among them, ``[B, T]``."""
        given = sample["net_input"]
        given = given.get("prev_output_tokens", given["src_tokens"])
        answers: Tensor = given.eq(self._asks).cumsum(-1).bool()
        return answers & sample["target"].ne(self._pad)

    @staticmethod
    def reduce_metrics(logging_outputs: list[dict[str, Any]]) -> None:
        """Log the loss, in bits as everywhere in fairseq, and the share of right answers."""

        def total(name: str) -> Any:
            return sum(log.get(name, 0) for log in logging_outputs)

        tokens, answers = total("sample_size"), total("nsentences")
        metrics.log_scalar("loss", total("loss") / tokens / math.log(2), tokens, round=3)
        metrics.log_scalar("exact", total("exact") / answers, answers, round=5)

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        """Return true: all logged values are sums."""
        return True
