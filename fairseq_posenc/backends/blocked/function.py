"""Computes attention over all blocks, forward and backward, as one autograd function.

A chunk is the sentences and heads that are computed together; a block is some queries of a chunk,
and the keys that they may see. The letters of shapes are those of
:mod:`~fairseq_posenc.backends.blocked.geometry`; C = H * D.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_posenc.backends.base import refuse_second_order
from fairseq_posenc.backends.blocked import dropout
from fairseq_posenc.backends.blocked.block_state import BlockState
from fairseq_posenc.backends.blocked.geometry import Block, Chunk, Geometry, Rule, Strip
from fairseq_posenc.backends.blocked.operands import Operands, reverse_queries
from fairseq_posenc.backends.blocked.scores import Scores
from fairseq_posenc.backends.blocked.skew import QUERY_SIDE
from fairseq_posenc.backends.blocked.values import Values
from fairseq_posenc.backends.forward_cache import writable


class BlockedAttention(torch.autograd.Function):
    """Attention, a block of scores at a time."""

    @staticmethod
    def forward(ctx: Any, geometry: Geometry, rule: Rule, *tensors: Any) -> Tensor:
        """Compute the attended values ``(B, H, T, D)``."""
        operands = _pad_to_tiles(geometry, rule, Operands(*tensors))
        batch, heads, queries, width = *operands.query.shape[:3], operands.value.size(-1)
        # In the layout of `_restore_queries`; a chunk of it is a view.
        gathered = operands.query.new_empty(queries, batch, heads, width)  # [T, B, H, D]
        gathered = gathered.permute(1, 2, 0, 3)  # [B, H, T, D]
        saved: list[Any] = []  # tensors or None
        for chunk, strips in geometry.split_chunks():
            target = chunk.select(gathered)  # [c, T, D]
            for visit in _visit_blocks(geometry, rule, chunk, strips, operands, iter(())):
                block, is_first, _, values, state = visit
                assert state.weights is not None
                kept = state.weights  # negative where dropped
                if rule.dropout:  # in place, unless they are to be saved
                    kept = kept.clamp(min=0) if rule.saves_weights else writable(kept).clamp_(min=0)
                target_rows = target[:, block.queries]
                sums = values.sum_by_weights(kept)
                if is_first:
                    target_rows.copy_(sums)
                else:
                    target_rows.add_(sums)
                if rule.saves:
                    saved += state.select_saved(rule)
        attended = _finish_attended(geometry, rule, operands, gathered)
        ctx.call = geometry, rule
        ctx.save_for_backward(attended, *operands, *saved)
        return attended

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of the operands."""
        refuse_second_order("blocked")
        geometry, rule = ctx.call
        with torch.autocast(grad.device.type, enabled=False):
            query, key, value, *others = _sum_gradients(ctx, grad)
        # Each is freed before the next is laid out.
        query = _restore_queries(query[:, :, : geometry.tgt_len].mul_(rule.scale))
        key = _transpose(key[..., : geometry.src_len])
        value = _transpose(value[..., : geometry.src_len])
        return None, None, query, key, value, *others


def _pad_to_tiles(geometry: Geometry, rule: Rule, operands: Operands) -> Operands:
    """Scale the query, put its last row first, and pad everything to whole tiles."""
    queries, keys = geometry.missing
    return operands._replace(
        query=reverse_queries(operands.query, queries).mul_(rule.scale),
        key=F.pad(operands.key, (0, 0, 0, keys)) if keys else operands.key,
        value=F.pad(operands.value, (0, 0, 0, keys)) if keys else operands.value,
    )


def _finish_attended(
    geometry: Geometry, rule: Rule, operands: Operands, gathered: Tensor
) -> Tensor:
    """Put attended values in the queries' order, scaled for dropout, zeros if fully masked.

    Saved in full precision: the gradients subtract numbers of nearly equal size.
    """
    attended = _restore_queries(gathered[:, :, : geometry.tgt_len])
    if rule.dropout:
        attended.mul_(dropout.compute_kept_factor(rule.dropout))
    if operands.fully_masked is not None:
        attended.masked_fill_(operands.fully_masked, 0.0)
    return attended


def _sum_gradients(ctx: Any, grad: Tensor) -> Operands:
    """Add up the gradients of all blocks."""
    geometry, rule = ctx.call
    attended, *saved = ctx.saved_tensors
    size = len(Operands._fields)
    operands = Operands(*saved[:size])
    states = _split_saved(saved[size:])
    if operands.fully_masked is not None:
        grad = grad.masked_fill(operands.fully_masked, 0.0)
    means = reverse_queries((grad * attended).sum(-1, keepdim=True), geometry.missing[0])
    grad = reverse_queries(grad, geometry.missing[0])  # [B, H, T, D]
    if rule.dropout:
        grad.mul_(dropout.compute_kept_factor(rule.dropout))
    totals = operands.make_zeros(ctx.needs_input_grad[2:])
    for chunk, strips in geometry.split_chunks():
        chunk_totals = totals.select_chunk(chunk)
        chunk_grad, chunk_mean = chunk.select(grad), chunk.select(means)  # [c, T, D], [c, T, 1]
        for visit in _visit_blocks(geometry, rule, chunk, strips, operands, states):
            block, is_first, scores, values, state = visit
            del visit
            assert state.weights is not None
            weights = state.weights
            kept = weights  # those that dropout kept
            if rule.dropout:
                kept = weights.clamp(min=0)
                weights = weights.abs() if rule.saves_weights else weights.abs_()
            mean = chunk_mean[:, block.queries]  # [c, M, 1]
            score_grad = values.add_gradients(kept, chunk_grad[:, block.queries], chunk_totals)
            # Of the softmax: weights * (their gradient - its mean), where it was not dropped.
            score_grad.mul_(kept).addcmul_(weights, mean, value=-1)  # [c, M, W]
            if chunk_totals.sink is not None:
                # The sink's weight is 1 less the weights of all blocks with these queries; the 1 is
                # counted with the first of the blocks.
                sink_weights = int(is_first) - weights.sum(-1)  # [c, M]
                sink_grad = (sink_weights * mean[..., 0]).sum(1, keepdim=True)
                chunk_totals.sink.sub_(sink_grad)
            del weights, kept  # their memory is needed
            scores.uncap_gradient(state, score_grad)
            scores.add_temperature_gradient(block, state, score_grad, chunk_totals)
            state = state._replace(weights=None, scores=None, capped=None)
            scores.add_gradients(block, state, score_grad, chunk_totals)
            if block is strips[-1][-1]:
                scores.finish_gradients(chunk_totals)
    return totals


class _Visit(NamedTuple):
    """A block, with the objects that compute its gradients and output, and its weights."""

    block: Block
    is_first: bool  # of the blocks with its queries
    scores: Scores
    values: Values
    state: BlockState


def _visit_blocks(
    geometry: Geometry,
    rule: Rule,
    chunk: Chunk,
    strips: list[Strip],
    operands: Operands,
    saved: Iterator[BlockState],
) -> Iterator[_Visit]:
    """Yield the blocks of a chunk, whose states may have been saved."""
    operands = operands.select_chunk(chunk)
    scores = Scores(geometry, rule, chunk, operands)
    for strip in strips:
        states = scores.compute_weights(strip, list(islice(saved, len(strip))))
        for block in strip:
            lines = None
            band = None
            if operands.value_table is not None:
                lines = scores.locate_reset(block)
                band = scores.band("value_table", block, QUERY_SIDE)
            values = Values(block, operands, lines, band)
            # A state is not kept here: its memory is needed.
            yield _Visit(block, block is strip[0], scores, values, states.pop(0))


def _split_saved(saved: list[Tensor | None]) -> Iterator[BlockState]:
    """Yield the saved state of each block."""
    size = len(BlockState._fields)
    for start in range(0, len(saved), size):
        yield BlockState(*saved[start : start + size])


def _restore_queries(x: Tensor) -> Tensor:
    """Reverse the queries of ``(B, H, T, D)``; fairseq's ``(T, B, C)`` is a view of the result."""
    return x.permute(2, 0, 1, 3).flip(0).contiguous().permute(1, 2, 0, 3)  # [B, H, T, D]


def _transpose(x: Tensor) -> Tensor:
    """Transpose ``(B, H, D, n)`` to ``(B, H, n, D)``.

    One matrix for each sentence: torch transposes it several times faster than one for each head.
    """
    out = x.new_empty(x.size(0), x.size(3), x.size(1) * x.size(2))  # [B, n, C]
    for target, source in zip(out, x.flatten(1, 2)):  # [n, C], [C, n]
        target.copy_(source.t())
    return out.unflatten(2, (x.size(1), -1)).transpose(1, 2)  # [B, H, n, D]
