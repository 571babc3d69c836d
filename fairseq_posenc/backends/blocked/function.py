"""The pass over all blocks, forward and backward."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from fairseq_posenc.backends.blocked.dropout import Dropout, keep
from fairseq_posenc.backends.blocked.factors import Factors
from fairseq_posenc.backends.blocked.geometry import Block, Chunk, Geometry
from fairseq_posenc.backends.blocked.gradients import ScoreGradients
from fairseq_posenc.backends.blocked.reset import LineGradients, Reset
from fairseq_posenc.backends.blocked.scores import Scores
from fairseq_posenc.backends.blocked.tables import Tables
from fairseq_posenc.backends.blocked.values import ValueGradients, Values


class Passed(NamedTuple):
    """A block after its forward pass.

    Attributes:
        factors: of its scores.
        weights: ``(c, M, W)``.
        dropped: the weights after dropout.
    """

    factors: Factors
    weights: Any
    dropped: Any

    def least(self, scores: Scores) -> Passed:
        """Return what it takes for a backward pass: factors of products, weights of sums."""
        if scores.product:
            return Passed(self.factors, None, None)
        content, gain, *_ = self.factors
        return self._replace(factors=Factors(None if gain is None else content, gain, None, None))


class BlockedAttention(torch.autograd.Function):
    """Attention, a block of scores at a time; the backward pass computes each block again."""

    @staticmethod
    def forward(
        ctx: Any,
        geometry: Geometry,
        dropout: Dropout | None,
        product: bool,
        scale: float,
        blind: Tensor | None,
        keeps: bool,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *tables: Tensor | None,
    ) -> Tensor:
        """Return the attended values ``(B, H, T, D)``.

        Args:
            ctx: torch's.
            geometry: of the call.
            dropout: None for none.
            product: how terms are combined.
            scale: of the query.
            blind: queries that may see no key, ``(B, T)``, which get zeros; or None.
            keeps: hold the blocks for the backward pass, which else computes them again.
            query: ``(B, H, T, D)``.
            key: ``(B, H, S, D)``.
            value: ``(B, H, S, D)``.
            *tables: see :class:`Tables`.
        """
        q = _last_first(geometry, query).mul_(scale)
        k, v = (_padded(x.to(q.dtype), geometry.padded_src) for x in (key, value))
        reset = Reset(geometry, q, k, Tables(*tables), product)
        gathered = torch.empty_like(q)
        held = []
        for chunk in geometry.chunks():
            of_heads = Tables(*tables).of_heads(chunk.heads)
            scores, values = _of_chunk(geometry, chunk, q, k, v, of_heads, product, reset)
            target = _part(gathered, chunk)
            for block in geometry.blocks():
                passed = _pass(scores, block, dropout)
                target[:, block.queries] = values.gathered(block, passed.dropped)
                if keeps:
                    held.append(passed.least(scores))
        # Held in full precision: the gradients subtract numbers of nearly equal size.
        attended = _put_back(gathered[:, :, : geometry.tgt_len].flip(2), q.dtype)
        if dropout is not None:
            attended.mul_(dropout.gain)
        if blind is not None:
            attended.masked_fill_(blind[:, None, :, None], 0.0)
        ctx.call = geometry, dropout, product, scale, blind
        ctx.held, ctx.reset = held, reset
        ctx.save_for_backward(q, k, v, attended, *tables)
        return attended.to(query.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of query, key, value and tables."""
        with torch.autocast(grad.device.type, enabled=False):
            return _backward(ctx, grad)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    geometry, dropout, product, scale, blind = ctx.call
    q, k, v, attended, *tables = ctx.saved_tensors
    held, ctx.held = deque(ctx.held), ()  # given back block by block
    if blind is not None:
        grad = grad.masked_fill(blind[:, None, :, None], 0.0)
    mean = _last_first(geometry, (grad * attended).sum(-1, keepdim=True))
    g = _last_first(geometry, grad)
    if dropout is not None:
        g.mul_(dropout.gain)
    grad_q = q.new_zeros(q.shape)
    grad_k, grad_v = (x.new_zeros(x.transpose(2, 3).shape) for x in (k, v))  # [B, H, D, S]
    totals = Tables(*tables).zeros(ctx.needs_input_grad[9:])
    at_lines = LineGradients(ctx.reset)
    for chunk in geometry.chunks():
        of_heads, of_totals = (t.of_heads(chunk.heads) for t in (Tables(*tables), totals))
        scores, values = _of_chunk(geometry, chunk, q, k, v, of_heads, product, ctx.reset)
        to_q, to_k, to_v, of_gathered, of_mean = (
            _part(x, chunk) for x in (grad_q, grad_k, grad_v, g, mean)
        )
        at_scores = ScoreGradients(scores, to_q, to_k, of_totals, at_lines)
        at_values = ValueGradients(values, to_v, of_totals.value_table)
        for block in geometry.blocks():
            factors, weights, dropped = _pass(
                scores, block, dropout, held.popleft() if held else None
            )
            of_scores = at_values.add(block, dropped, of_gathered[:, block.queries])
            # Of the softmax: weights * (their gradient - its mean), where it was not dropped.
            of_scores.mul_(dropped).addcmul_(weights, of_mean[:, block.queries], value=-1)
            del weights, dropped  # their memory is needed
            at_scores.add(block, factors, of_scores)
    at_lines.finish(q, k, grad_q, grad_k, totals)
    return (
        *[None] * 6,
        _put_back(grad_q[:, :, : geometry.tgt_len].flip(2).mul_(scale), grad.dtype),
        _turned_back(grad_k[..., : geometry.src_len], grad.dtype),
        _turned_back(grad_v[..., : geometry.src_len], grad.dtype),
        *totals,
    )


def _of_chunk(
    geometry: Geometry,
    chunk: Chunk,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tables: Tables,
    product: bool,
    reset: Reset,
) -> tuple[Scores, Values]:
    query, key, value = (_part(x, chunk) for x in (query, key, value))
    scores = Scores(geometry, chunk, query, key, tables, product, reset)
    return scores, Values(geometry, chunk, value, tables.value_table)


def _pass(
    scores: Scores, block: Block, dropout: Dropout | None, held: Passed | None = None
) -> Passed:
    """Return what a forward pass makes of a block, starting from what was held of it."""
    if held is not None and held.weights is not None:
        return held
    factors = scores.factors(block) if held is None else held.factors
    weights = scores.weights(block, factors)
    if dropout is None:
        return Passed(factors, weights, weights)
    return Passed(factors, weights, keep(weights, dropout.kept(*scores.chunk, *block)))


def _last_first(geometry: Geometry, x: Tensor) -> Tensor:
    """Return ``(B, H, T, D)`` with the last query first, in float32 at least."""
    kind = torch.promote_types(x.dtype, torch.float32)
    return _padded(x.flip(2).to(kind), geometry.padded_tgt)


def _padded(x: Tensor, length: int) -> Tensor:
    missing = length - x.size(2)
    return F.pad(x, (0, 0, 0, missing)) if missing else x


def _part(x: Tensor, chunk: Chunk) -> Tensor:
    """Return a chunk of ``(B, H, n, D)`` as ``(c, n, D)``, a view."""
    return x[chunk].flatten(0, 1)


def _put_back(x: Tensor, kind: torch.dtype) -> Tensor:
    """Return ``(B, H, n, D)`` in a type, and laid out so that fairseq's ``(n, B, C)`` is a view."""
    return x.permute(2, 0, 1, 3).contiguous().to(kind).permute(1, 2, 0, 3)


def _turned_back(x: Tensor, kind: torch.dtype) -> Tensor:
    """Return ``(B, H, D, n)`` as ``(B, H, n, D)`` in a type.

    One matrix for each sentence: torch transposes it several times faster than one for each head.
    """
    out = x.new_empty(x.size(0), x.size(3), x.size(1) * x.size(2))
    for target, source in zip(out, x.flatten(1, 2)):
        target.copy_(source.t())
    return out.to(kind).unflatten(2, (x.size(1), -1)).transpose(1, 2)
