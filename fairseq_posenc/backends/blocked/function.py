"""Computes attention over all blocks, forward and backward, as one autograd function.

A chunk is the sentences and heads that are computed together; a block is some queries of a chunk,
and the keys that they may see. A strip is the blocks with the same queries, which share a softmax.
Inside of the function, queries are stored last one first, and gradients of keys and values are
transposed. Some names are deleted or replaced only to free their memory early.

The letters of shapes are those of :mod:`~fairseq_posenc.backends.blocked.geometry`; C = H * D.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_posenc.backends.base import refuse_second_order
from fairseq_posenc.backends.blocked import dropout
from fairseq_posenc.backends.blocked.block_state import BlockState
from fairseq_posenc.backends.blocked.geometry import Block, Geometry, Settings, Strip
from fairseq_posenc.backends.blocked.operands import Operands, reverse_queries
from fairseq_posenc.backends.blocked.scores import Scores
from fairseq_posenc.backends.blocked.skew import QUERY_SIDE
from fairseq_posenc.backends.blocked.values import Values
from fairseq_posenc.backends.forward_cache import copy_if_kept
from fairseq_posenc.encodings.precision import no_autocast


class BlockedAttention(torch.autograd.Function):
    """Attention, a block of scores at a time."""

    @staticmethod
    def forward(ctx: Any, geometry: Geometry, settings: Settings, *tensors: Any) -> Tensor:
        """Compute the attended values ``(B, H, T, D)``; ``tensors`` are the fields of Operands."""
        operands = _pad_to_tiles(geometry, settings, Operands(*tensors))
        batch, heads, queries, _ = operands.query.shape
        # In the layout of `_restore_queries`; a chunk of it is a view.
        gathered = operands.query.new_empty(queries, batch, heads, operands.value.size(-1))
        gathered = gathered.permute(1, 2, 0, 3)  # [B, H, T, D]
        saved_fields: list[Any] = []  # the fields of each block's state in turn
        for chunk, strips in geometry.split_chunks():
            chunk_gathered = chunk.select(gathered)  # [c, T, D]
            scores = Scores(geometry, settings, chunk, operands.select_chunk(chunk))
            blocks = _visit_blocks(scores, strips, saved_states=iter(()))
            for block, opens_strip, values, state in blocks:
                assert state.weights is not None
                kept = state.weights  # negative where dropped
                if settings.dropout and settings.saves_weights:
                    kept = kept.clamp(min=0)
                elif settings.dropout:  # in place, as they are not saved
                    kept = copy_if_kept(kept).clamp_(min=0)
                sums = values.sum_by_weights(kept)
                if opens_strip:
                    chunk_gathered[:, block.queries] = sums
                else:
                    chunk_gathered[:, block.queries] += sums
                if settings.saves:
                    saved_fields.extend(state.select_saved(settings.product))
        attended = _restore_queries(gathered[:, :, : geometry.tgt_len])
        if settings.dropout:
            attended.mul_(dropout.compute_kept_factor(settings.dropout))
        if operands.fully_masked is not None:
            attended.masked_fill_(operands.fully_masked, 0.0)
        ctx.call = geometry, settings
        # In full precision: the gradients subtract numbers of nearly equal size.
        ctx.save_for_backward(attended, *operands, *saved_fields)
        return attended

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of the operands."""
        refuse_second_order("blocked")
        geometry, settings = ctx.call
        with no_autocast(grad.device):
            query, key, value, *others = _sum_gradients(ctx, grad)
        # Each of the three is freed before the next is laid out.
        query = _restore_queries(query[:, :, : geometry.tgt_len].mul_(settings.scale))
        key = _transpose(key[..., : geometry.src_len])
        value = _transpose(value[..., : geometry.src_len])
        return None, None, query, key, value, *others


def _pad_to_tiles(geometry: Geometry, settings: Settings, operands: Operands) -> Operands:
    """Scale the query, put its last row first, and pad everything to whole tiles."""
    missing_queries, missing_keys = geometry.missing
    at_end = (0, 0, 0, missing_keys)
    return operands._replace(
        query=reverse_queries(operands.query, missing_queries).mul_(settings.scale),
        key=F.pad(operands.key, at_end) if missing_keys else operands.key,
        value=F.pad(operands.value, at_end) if missing_keys else operands.value,
    )


def _sum_gradients(ctx: Any, grad: Tensor) -> Operands:
    """Add up the gradients of all blocks."""
    geometry, settings = ctx.call
    attended, *fields = ctx.saved_tensors
    operand_count = len(Operands._fields)
    operands = Operands(*fields[:operand_count])
    saved_states = _split_states(fields[operand_count:])
    if operands.fully_masked is not None:
        grad = grad.masked_fill(operands.fully_masked, 0.0)
    # The mean of the gradients of a query's weights, by weight (FlashAttention's delta).
    means = reverse_queries((grad * attended).sum(-1, keepdim=True), geometry.missing[0])
    grad = reverse_queries(grad, geometry.missing[0])  # [B, H, T, D]
    if settings.dropout:
        grad.mul_(dropout.compute_kept_factor(settings.dropout))
    totals = operands.make_zeros(ctx.needs_input_grad[2:])
    for chunk, strips in geometry.split_chunks():
        chunk_totals = totals.select_chunk(chunk)
        chunk_grad, chunk_mean = chunk.select(grad), chunk.select(means)  # [c, T, D], [c, T, 1]
        scores = Scores(geometry, settings, chunk, operands.select_chunk(chunk))
        for block, opens_strip, values, state in _visit_blocks(scores, strips, saved_states):
            assert state.weights is not None
            weights = state.weights
            kept = weights  # those that dropout kept
            if settings.dropout:
                kept = weights.clamp(min=0)
                weights = weights.abs() if settings.saves_weights else weights.abs_()
            mean = chunk_mean[:, block.queries]  # [c, M, 1]
            score_grad = values.add_gradients(kept, chunk_grad[:, block.queries], chunk_totals)
            # Through the softmax: weights * (their gradient, 0 for a dropped one, less the mean).
            score_grad.mul_(kept).addcmul_(weights, mean, value=-1)  # [c, M, W]
            if chunk_totals.sink is not None:
                # The sink's weight is 1 less the weights of all blocks with these queries; the 1 is
                # counted with the first of the blocks.
                sink_weights = int(opens_strip) - weights.sum(-1)  # [c, M]
                chunk_totals.sink.sub_((sink_weights * mean[..., 0]).sum(1, keepdim=True))
            del weights, kept  # their memory is needed
            scores.add_temperature_gradient(block, state, score_grad, chunk_totals)
            state = state._replace(weights=None, scores=None, capped=None)
            scores.add_gradients(block, state, score_grad, chunk_totals)
        scores.finish_gradients(chunk_totals)  # those that blocks only collected
    return totals


def _visit_blocks(
    scores: Scores, strips: list[Strip], saved_states: Iterator[BlockState]
) -> Iterator[tuple[Block, bool, Values, BlockState]]:
    """Yield each block of a chunk, the object that computes its output, and its state and weights.

    The bool is True for the first block of a strip. States are computed if none were saved.
    """
    for strip in strips:
        states = scores.compute_weights(strip, list(islice(saved_states, len(strip))))
        for block in strip:
            rows = scores.prepare_rows("value_table", block, QUERY_SIDE)
            lines = None if rows is None else scores.locate_reset(block)
            values = Values(block, scores.operands, lines, rows)
            # Popped, so that the caller can free the state.
            yield block, block is strip[0], values, states.pop(0)


def _split_states(fields: list[Tensor | None]) -> Iterator[BlockState]:
    """Yield the saved state of each block."""
    field_count = len(BlockState._fields)
    for start in range(0, len(fields), field_count):
        yield BlockState(*fields[start : start + field_count])


def _restore_queries(x: Tensor) -> Tensor:
    """Reverse the queries of ``(B, H, T, D)``; fairseq's ``(T, B, C)`` is a view of the result."""
    return x.permute(2, 0, 1, 3).flip(0).contiguous().permute(1, 2, 0, 3)  # [B, H, T, D]


def _transpose(x: Tensor) -> Tensor:
    """Transpose ``(B, H, D, n)`` to ``(B, H, n, D)``.

    As one matrix for each sentence, which torch transposes several times faster than its heads.
    """
    out = x.new_empty(x.size(0), x.size(3), x.size(1) * x.size(2))  # [B, n, C]
    for target, source in zip(out, x.flatten(1, 2)):  # [n, C], [C, n]
        target.copy_(source.t())
    return out.unflatten(2, (x.size(1), -1)).transpose(1, 2)  # [B, H, n, D]
