"""Softmax, dropout and the sum of values of a block, which store one number for each pair.

Every query of a head draws two seeds of 32 bits, q and r, and every key draws one seed s. The hash
``(((q ^ s) * MURMUR_MULTIPLIER) ^ r) * XXHASH_MULTIPLIER`` decides whether the weight of a pair is
dropped. Without r, it would depend on ``q ^ s`` alone, and two queries whose seeds q differ in few
bits would drop related keys. A block that the backward pass computes again drops the same weights,
by the same seeds. torch's own generator takes about ten times as long on a CPU.

Shapes: a block has k sentences, h heads, M queries and W keys; D head size.
"""

from typing import Any

import torch
from torch import Tensor

from fairseq_posenc.torch_modes import copy_if_kept

# From MurmurHash2 and xxHash32, as signed numbers of 32 bits. They are odd, so multiplying by them
# with int32's overflow maps different numbers to different numbers.
MURMUR_MULTIPLIER = 0x5BD1E995
XXHASH_MULTIPLIER = 0x85EBCA77 - 2**32


def draw_seeds(*shape: int, device: torch.device) -> Tensor:
    """Draw seeds from torch's generator, which activation checkpointing rewinds."""
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device=device)


def compute_keep_threshold(rate: float) -> int:
    """Compute the threshold: a weight is kept if its hash, an int32, is below it."""
    # Rate 0 gives 2^31, which int32 lacks; with 2^31 - 1 it drops one weight of 2^32.
    return min(round((1 - rate) * 2**32) - 2**31, 2**31 - 1)


def mark_dropped(weights: Tensor, rate: float, query_seeds: Tensor, key_seeds: Tensor) -> Tensor:
    """Negate the dropped weights of ``(..., M, W)``, so that one tensor holds both sets.

    With the second of ``.2 .3 .5`` dropped, the result is ``.2 -.3 .5``: its clamp at 0,
    ``.2 0 .5``, multiplies the values, and its absolute value is the softmax. The factor
    1 / (1 - rate) is left to the caller.

    Args:
        weights: float32 or float64, none below 0.
        rate: probability of dropping a weight.
        query_seeds: two for each query, ``(2, ..., M)``.
        key_seeds: one for each key, ``(..., W)``.
    """
    first_seed, second_seed = query_seeds.unsqueeze(-1)  # each [..., M, 1]
    bits = first_seed ^ key_seeds.unsqueeze(-2)  # [..., M, W]
    bits.mul_(MURMUR_MULTIPLIER).bitwise_xor_(second_seed).mul_(XXHASH_MULTIPLIER)
    threshold = compute_keep_threshold(rate)
    if weights.dtype == torch.float64:  # an int32 holds the sign bit of a float32 only
        return weights.where(bits < threshold, -weights)
    bits.ge_(threshold).bitwise_left_shift_(31)  # 1 in the sign bit of dropped weights
    return bits.bitwise_or_(weights.view(torch.int32)).view(weights.dtype)


class Weigh(torch.autograd.Function):
    """Turns the scores of a block into weights, drops some, and sums values by the others.

    The weights that :func:`mark_dropped` returns are all that both gradients need of them.
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
        """Compute the sums ``(k, h, M, D)`` and the weights ``(k, h, M, W)``, 0 where dropped.

        Args:
            ctx: torch's context of this call.
            scores: ``(k, h, M, W)``, or with one more column for a sink, whose weight is cut off.
            flushes: whether tiny weights, as ALiBi gives far keys, become 0: some processors
                multiply denormal numbers ten times slower.
            rate: probability of dropping a weight.
            query_seeds: two for each query, ``(k, h, 2, M)``; None without dropout.
            key_seeds: one for each key, ``(k, h, W)``; None without dropout.
            sums: the first result, if it is known and only its gradients are needed; the second
                result then has no meaning.
            value: ``(k, h, W, D)``.
        """
        # In place of the scores, or of a copy where checkpointing may keep them.
        weights = torch.softmax(scores, -1, out=copy_if_kept(scores.detach()))
        weights = torch.threshold_(weights, 1e-30, 0.0) if flushes else weights  # denormal: 1e-38
        weights = weights[..., : value.size(2)]  # without the column of a sink
        kept = weights  # without dropout, all of them
        if query_seeds is not None and key_seeds is not None:
            kept = weights.contiguous()
            weights = mark_dropped(kept, rate, query_seeds.movedim(2, 0), key_seeds)
            if sums is None:
                torch.clamp(weights, min=0, out=kept)
        sums = kept @ value if sums is None else sums
        ctx.rate, ctx.has_sink = rate, scores.size(-1) > weights.size(-1)
        ctx.set_materialize_grads(False)  # kept weights that nothing used have the gradient None
        ctx.save_for_backward(weights, sums, value)
        return sums.view_as(sums), kept  # a view, since `sums` may be an argument

    @staticmethod
    def backward(ctx: Any, grad: Tensor, kept_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        """Compute the gradients of scores and values; ``grad``, of the sums, is never None."""
        weights, sums, value = ctx.saved_tensors
        kept = weights.clamp(min=0) if ctx.rate else weights
        # The gradients of a query's weights, averaged by these weights (FlashAttention's delta).
        mean = (grad * sums).sum(-1, keepdim=True)
        value_grad = (grad.mT @ kept).mT  # the faster layout
        score_grad = grad @ value.mT
        if kept_grad is not None:
            mean += (kept_grad * kept).sum(-1, keepdim=True)
            score_grad += kept_grad
        # Through the softmax: each weight times its own gradient, 0 if dropped, less the mean.
        if ctx.rate:
            weights.abs_()  # in place: a block is differentiated once
        score_grad.mul_(kept).addcmul_(weights, mean, value=-1)
        if ctx.has_sink:  # a query's gradients of scores, with that of the sink, add up to 0
            score_grad = torch.cat([score_grad, -score_grad.sum(-1, keepdim=True)], -1)
        return score_grad, None, None, None, None, None, value_grad
