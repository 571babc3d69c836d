"""The criterion ``answers``: the loss of the answers alone, for questions with one right answer.

It works with fairseq's tasks ``language_modeling`` and ``translation``.
"""

from __future__ import annotations

import math
from typing import Any

import torch.nn.functional as F
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.logging import metrics
from torch import Tensor

from fairseq_posenc.errors import UserError

ASKS = "="  # the symbol before the answer


@register_criterion("answers")
class AnswersCriterion(FairseqCriterion):
    """Cross-entropy of the answer after ``=``, and the exact match of greedy search.

    Each token is predicted from the right ones before it. If the likeliest token is right
    everywhere, greedy search finds the whole answer, and only then.
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
        """Compute the summed loss, the number of its tokens, and the values to log, all sums."""
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
        """Mask the targets that belong to the answer, with its end, ``[B, T]``."""
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
        """Confirm that all logged values are sums."""
        return True
