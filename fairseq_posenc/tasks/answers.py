"""Defines the criterion ``answers``: a loss on answers only, for questions with one right answer.

``benchmarks/probe.py`` trains with it. It works with fairseq's tasks ``language_modeling`` (for
encoders with ``--self-target``) and ``translation`` (whose targets begin with ``=``).
"""

import math
from typing import Any

import torch.nn.functional as F
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.logging import metrics
from torch import Tensor

from fairseq_posenc.errors import UserError

# A sample with two answers: `3 + 4 = 7 ; 2 + 2 = 4`.
ASKS = "="  # comes before an answer
ENDS = ";"  # comes after an answer if more text follows
BLANK = "<blank>"  # replaces each token of an answer in an encoder's input


@register_criterion("answers")
class AnswersCriterion(FairseqCriterion):
    """Cross-entropy of the answers after ``=``, and the exact match of greedy search.

    A decoder predicts each token given the correct tokens before it: greedy search finds all
    answers exactly if the likeliest token is correct everywhere. An encoder predicts all tokens of
    the answers at once, each in place of a blank (Ruoss et al. 2023, arXiv:2305.16843).
    """

    def __init__(self, task: Any) -> None:
        super().__init__(task)
        dictionary = task.target_dictionary
        self._asks = dictionary.index(ASKS)
        self._ends = dictionary.index(ENDS) if ENDS in dictionary else -1  # not <unk>'s
        self._blank = dictionary.index(BLANK)
        self._pad = dictionary.pad()
        self._is_encoder = getattr(task, "targets", None) == ["self"]  # --self-target
        for symbol in (ASKS, BLANK) if self._is_encoder else (ASKS,):
            if dictionary.index(symbol) == dictionary.unk():
                raise UserError(f"--criterion answers: the dictionary has no {symbol!r}")

    def forward(self, model: Any, sample: Any) -> tuple[Tensor, int, dict[str, Tensor | int]]:
        """Compute the summed loss, the number of answer tokens, and the values to log, all sums."""
        inputs = sample["net_input"]
        target = sample["target"]  # [B, T]
        # In translation, the decoder reads the targets shifted by one, not the source.
        tokens = inputs.get("prev_output_tokens", inputs["src_tokens"])  # [B, T]
        in_answer = self.mask_answers(tokens, target)
        if self._is_encoder:
            blanked = inputs["src_tokens"].masked_fill(in_answer, self._blank)
            inputs = {**inputs, "src_tokens": blanked}
        scores = model(**inputs)[0].float()  # [B, T, V]
        loss = F.cross_entropy(scores[in_answer], target[in_answer], reduction="sum")
        has_error = ((scores.argmax(-1) != target) & in_answer).any(-1)  # [B]
        count = int(in_answer.sum())
        logged = {
            "loss": loss.detach(),
            "ntokens": sample["ntokens"],
            "nsentences": len(target),
            "sample_size": count,  # fairseq divides gradients by it
            "exact": len(target) - has_error.sum(),
        }
        return loss, count, logged

    def mask_answers(self, tokens: Tensor, target: Tensor) -> Tensor:
        """Mark the targets that belong to an answer, ``[B, T]``.

        A decoder also learns the ``;`` after an answer: of the targets ``4 = 7 ; 2``, it counts
        ``7 ;`` and an encoder ``7``. An answer without ``;`` ends with its ``</s>``.
        """
        asks = tokens.eq(self._asks)
        begun = asks.cumsum(-1)
        if self._is_encoder:
            begun = begun - asks.long()  # its targets are its inputs, and `=` is not an answer
        is_open: Tensor = begun > tokens.eq(self._ends).cumsum(-1)  # more answers begun than ended
        return is_open & target.ne(self._pad)

    @staticmethod
    def reduce_metrics(logging_outputs: list[dict[str, Tensor | int]]) -> None:
        """Log the loss, in bits, and the share of samples whose answers are all right."""
        names = ("sample_size", "nsentences", "loss", "exact")
        answer_tokens, samples, loss, exact = (
            sum(log.get(name, 0) for log in logging_outputs) for name in names
        )
        metrics.log_scalar("loss", loss / answer_tokens / math.log(2), answer_tokens, round=3)
        metrics.log_scalar("exact", exact / samples, samples, round=5)

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        """Confirm that all logged values are sums."""
        return True
