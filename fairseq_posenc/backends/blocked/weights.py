"""Softmax, dropout and the sum of values of a block, which save one number for each pair."""

from typing import Any

import torch
from torch import Tensor

from fairseq_posenc.backends.blocked.dropout import mark_dropped
from fairseq_posenc.backends.forward_cache import copy_if_kept


class Weigh(torch.autograd.Function):
    """Turns the scores of a block into weights, drops some, and sums values by the others.

    A dropped weight keeps its size and gets a minus sign, so that one tensor holds what the
    gradients of the softmax and of the values need. The factor 1 / (1 - rate) is the caller's.
    """

    @staticmethod
    def forward(
        ctx: Any,
        scores: Tensor,
        flushes: bool,
        rate: float,
        query_seeds: Tensor | None,
        key_seeds: Tensor | None,
        sums: Tensor | None,
        value: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Compute the sums ``(k, h, M, D)``, and the kept weights, whose dropped ones are 0.

        Args:
            ctx: of torch.
            scores: ``(k, h, M, W)``, or with a column more for sinks, whose weights are cut off.
            flushes: whether denormal numbers become 0: some processors multiply them, as far keys
                have with ALiBi, ten times slower.
            rate: probability of dropping a weight.
            query_seeds: two for each query, ``(k, h, 2, M)``; None without dropout.
            key_seeds: ``(k, h, W)``.
            sums: the first result, if it is known and only its gradients are needed; the second
                one is then of no use.
            value: ``(k, h, W, D)``.
        """
        weights = copy_if_kept(scores.softmax(-1))
        weights = torch.threshold_(weights, 1e-30, 0.0) if flushes else weights
        weights = weights[..., : value.size(2)]
        if query_seeds is not None and key_seeds is not None:
            weights = mark_dropped(weights.contiguous(), rate, query_seeds.movedim(2, 0), key_seeds)
        kept = weights.clamp(min=0) if rate and sums is None else weights
        if sums is None:
            sums = kept @ value
        ctx.rate, ctx.sinks = rate, scores.size(-1) - weights.size(-1)
        ctx.set_materialize_grads(False)  # None for kept weights that nothing used
        ctx.save_for_backward(weights, sums, value)
        return sums.view_as(sums), kept  # a view, since `sums` may be an argument

    @staticmethod
    def backward(ctx: Any, grad: Tensor, kept_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        """Compute the gradients of scores and values, given those of both results."""
        weights, sums, value = ctx.saved_tensors
        kept = weights.clamp(min=0) if ctx.rate else weights
        # The mean of the gradients of a query's weights, by weight (FlashAttention's delta).
        mean = (grad * sums).sum(-1, keepdim=True)
        value_grad = (grad.mT @ kept).mT  # the faster layout
        score_grad = grad @ value.mT
        if kept_grad is not None:
            mean += (kept_grad * kept).sum(-1, keepdim=True)
            score_grad += kept_grad
        # Through the softmax: weights * (their gradient, 0 for a dropped one, less the mean).
        if ctx.rate:
            weights = weights.abs_()  # in place: a block is differentiated once
        score_grad.mul_(kept).addcmul_(weights, mean, value=-1)
        if ctx.sinks:  # all gradients of a softmax add up to 0
            score_grad = torch.cat([score_grad, -score_grad.sum(-1, keepdim=True)], -1)
        return score_grad, None, None, None, None, None, value_grad
