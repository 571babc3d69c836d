"""The criterion ``answers``: the loss of the answers alone, for questions with one right answer.

It works with fairseq's tasks ``language_modeling``, with ``--self-target`` for encoders, and
``translation``, where the target begins with ``=``.
"""

from __future__ import annotations

import math
from typing import Any

import torch.nn.functional as F
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.logging import metrics
from torch import Tensor

from fairseq_posenc.errors import UserError

ASKS, ENDS = "=", ";"  # the symbols before an answer, and after it if more text follows
BLANK = "<blank>"  # what an encoder sees in place of an answer


@register_criterion("answers")
class AnswersCriterion(FairseqCriterion):
    """Cross-entropy of the answers after ``=``, and the exact match of greedy search.

    A decoder predicts each token from the right ones before it. If the likeliest token is right
    everywhere, greedy search finds all answers, and only then. An encoder predicts all tokens of
    the answers at once, each at a place of its own (Ruoss et al. 2023, arXiv:2305.16843).
    """

    def __init__(self, task: Any) -> None:
        super().__init__(task)
        dictionary = task.target_dictionary
        self._asks, self._ends = dictionary.index(ASKS), dictionary.index(ENDS)
        self._blank, self._pad = dictionary.index(BLANK), dictionary.pad()
        self._is_encoder = getattr(task, "targets", None) == ["self"]
        for symbol in (ASKS, BLANK) if self._is_encoder else (ASKS,):
            if dictionary.index(symbol) == dictionary.unk():
                raise UserError(f"--criterion answers: the dictionary has no {symbol!r}")

    def forward(
        self, model: Any, sample: dict[str, Any], reduce: bool = True
    ) -> tuple[Tensor, int, dict[str, Any]]:
        """Compute the summed loss, the number of its tokens, and the values to log, all sums."""
        given, counted = sample["net_input"], self.mask_answers(sample)
        if self._is_encoder:
            given = {**given, "src_tokens": given["src_tokens"].masked_fill(counted, self._blank)}
        scores = model(**given)[0].float()  # [B, T, V]
        target = sample["target"]  # [B, T]
        loss = F.cross_entropy(scores[counted], target[counted], reduction="sum")
        wrong = ((scores.argmax(-1) != target) & counted).any(-1)  # [B]
        count = int(counted.sum())
        logged = {
            "loss": loss.detach(),
            "ntokens": sample["ntokens"],
            "nsentences": len(target),
            "sample_size": count,
            "exact": len(target) - wrong.sum(),
        }
        return loss, count, logged

    def mask_answers(self, sample: dict[str, Any]) -> Tensor:
        """Mask the targets of answers, ``[B, T]``; a decoder's with the symbol that ends it."""
        given = sample["net_input"]
        given = given.get("prev_output_tokens", given["src_tokens"])
        asks = given.eq(self._asks)
        started = asks.cumsum(-1)
        if self._is_encoder:
            started = started - asks.long()  # what asks is itself no answer
        open_answers: Tensor = started > given.eq(self._ends).cumsum(-1)
        return open_answers & sample["target"].ne(self._pad)

    @staticmethod
    def reduce_metrics(logging_outputs: list[dict[str, Any]]) -> None:
        """Log the loss, in bits as everywhere in fairseq, and the share of right answers."""
        names = ("sample_size", "nsentences", "loss", "exact")
        tokens, answers, loss, exact = (
            sum(log.get(name, 0) for log in logging_outputs) for name in names
        )
        metrics.log_scalar("loss", loss / tokens / math.log(2), tokens, round=3)
        metrics.log_scalar("exact", exact / answers, answers, round=5)

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        """Confirm that all logged values are sums."""
        return True
