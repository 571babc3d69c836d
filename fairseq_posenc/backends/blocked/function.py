"""Computes blocks of a call, each as a plain function that autograd differentiates.

The function of a block is the equation; see :mod:`~fairseq_posenc.backends.equation`. Either the
graphs of all blocks are kept for the backward pass, or they are built again there, one by one. So
scores exist for one block at a time.

Shapes: k sentences and h heads of a block, M queries, W keys, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fairseq_posenc.backends import equation
from fairseq_posenc.backends.base import refuse_second_order
from fairseq_posenc.backends.blocked.bands import (
    JoinProducts,
    Multiply,
    multiply_rows,
    sum_rows,
    view_by_distance,
)
from fairseq_posenc.backends.blocked.dropout import Weigh
from fairseq_posenc.backends.blocked.geometry import Block
from fairseq_posenc.backends.blocked.operands import HIDDEN, Operands
from fairseq_posenc.backends.forward_cache import copy_if_kept
from fairseq_posenc.encodings.precision import no_autocast
from fairseq_posenc.mask import Mask


@dataclass(frozen=True)
class Computation:
    """What blocks compute of a call's tensors.

    Attributes:
        blocks: they cover all queries.
        src_len: the number of keys of the call.
        mask: hides pairs that the operands do not hide; None if they hide all.
        product: whether content and rows are multiplied, not added.
        softcap: the limit of the scores.
        flushes: whether weights may be denormal numbers, which become 0.
        dropout: the probability of dropping a weight.
        saves: whether the graphs of blocks are kept for the backward pass.
    """

    blocks: Sequence[Block]
    src_len: int
    mask: Mask | None
    product: bool
    softcap: float | None
    flushes: bool
    dropout: float
    saves: bool

    def attend(self, x: Operands, block: Block, sums: Tensor | None = None) -> Tensor:
        """Compute the sums of values of a block, ``(k, h, M, D)``, not divided by the keep rate.

        Args:
            x: the tensors of the block, each described at its field.
            block: its places in the call.
            sums: the result, if it is known and only its graph is needed.
        """
        content, rows = self._multiply_tokens(x)
        # Without a scale, which queries or rows have; in place, as nothing else reads the content.
        scores = equation.score(
            content,
            rows,
            product=self.product and bool(rows),
            gain=None if x.gain is None else view_by_distance(x.gain, x.query.size(2)),
            biases=[] if x.bias is None else [view_by_distance(x.bias, x.query.size(2))],
            add=Tensor.add_,
            multiply=_multiply,
        )
        if x.first_at is not None and x.first_query is not None and x.first_key is not None:
            query_at, key_at = block.list_places(self.src_len, scores.device)
            first_at = x.first_at[:, None, None, None]
            scores = torch.where(first_at == key_at, x.first_key, scores)
            scores = torch.where(first_at == query_at, x.first_query, scores)
        scores = equation.score(
            scores,
            biases=self._list_biases(x, block),
            temperature=x.temperature,
            softcap=self.softcap,
            add=Tensor.add_,
        )
        if x.hidden is not None:
            scores = scores.add_(view_by_distance(x.hidden, scores.size(2)))
        if x.padding is not None:
            scores = scores.add_(x.padding[:, :, None])
        if self.mask is not None:
            query_at, key_at = block.list_places(self.src_len, scores.device)
            hidden = self.mask.select_sentences(block.sentences).hides(query_at, key_at)
            scores = scores.masked_fill_(hidden[:, None], HIDDEN)
        if x.sink is not None:
            scores = torch.cat([scores, x.sink.expand(*scores.shape[:3], 1)], -1)
        known = sums if x.value_rows is None else None  # else they include sums of rows
        attended, kept = Weigh.apply(  # softmax, dropout, sums of values; the weights that are kept
            scores, self.flushes, self.dropout, x.query_seeds, x.key_seeds, known, x.value
        )
        if x.value_rows is not None:
            attended = attended + sum_rows(kept, x.value_rows, x.value_index)
        return attended

    def _multiply_tokens(self, x: Operands) -> tuple[Tensor, list[Tensor]]:
        """Multiply queries with keys, and both with the rows of their pairs.

        Returns:
            The content q_i.k_j, which the caller may overwrite, and the products with rows; none
            if the content includes them, as with far keys, or where they are added in place.
        """
        content, products = copy_if_kept(x.query @ x.key.mT), []
        onto = None if self.product or x.gain is not None else content  # a gain is of content only
        if x.query_rows is not None:
            products.append(multiply_rows(x.query, x.query_rows, x.query_index, False, onto))
        if x.key_rows is not None:
            products.append(multiply_rows(x.key, x.key_rows, x.key_index, True, onto))  # of_keys
        products = products if onto is None else []  # else the content includes them
        if x.before_key is None:  # no keys are far: see `Operands`
            return content, products
        scores = equation.score(
            content, products, product=self.product, add=Tensor.add_, multiply=_multiply
        )
        far = x.before_query, x.before_key, x.after_query, x.after_key
        return JoinProducts.apply(scores, *far), []

    def _list_biases(self, x: Operands, block: Block) -> list[Tensor]:
        """List what is added to the scaled scores, but the bias by distance."""
        biases = [] if x.pair_bias is None else [x.pair_bias]
        if x.state_rows is not None and x.states is not None:
            biases.append(multiply_rows(x.states, x.state_rows, x.state_index, of_keys=False))
        if x.query_decay is not None and x.key_decay is not None:
            decay = equation.subtract_sums(x.query_decay, x.key_decay)
            if x.later_query_decay is not None and x.later_key_decay is not None:
                later = equation.subtract_sums(x.later_query_decay, x.later_key_decay)
                query_at, key_at = block.list_places(self.src_len, later.device)
                decay = torch.where(key_at > query_at, later, decay)
            biases.append(decay.to(x.query.dtype))
        return biases


class Blocks(torch.autograd.Function):
    """Computes all blocks, and adds up the gradients of what they share."""

    @staticmethod
    def forward(ctx: Any, work: Computation, *tensors: Tensor | None) -> Tensor:
        """Compute the sums of values ``(B, H, T, D)``; ``tensors`` are the operands."""
        call = Operands._make(tensors)
        batch, heads, queries, _ = call.query.shape
        # fairseq's `(T, B, C)` is a view of this.
        sums = call.value.new_empty(queries, batch, heads, call.value.size(3))
        sums = sums.permute(1, 2, 0, 3)  # [B, H, T, D]
        ctx.graphs = []
        for block in work.blocks:
            if work.saves:
                ctx.graphs.append(_record(work, call, block))
                attended = ctx.graphs[-1][1]
            else:
                attended = work.attend(call.select(block, call), block)
            block.select(sums, "BHTD").copy_(attended.detach())  # a view of the block's part
        ctx.work = work
        ctx.save_for_backward(sums, *tensors)
        return sums

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of the tensors."""
        refuse_second_order("blocked")
        work = ctx.work
        sums, *tensors = ctx.saved_tensors
        call = Operands._make(tensors)
        learns = [x is not None and x.requires_grad for x in tensors]
        totals = [torch.zeros_like(x) if y else None for x, y in zip(tensors, learns)]
        key_fields = [call._fields.index(x) for x in ("key", "value", "before_key", "after_key")]
        for index in key_fields:  # transposed: the products for them are faster
            if learns[index]:
                x = tensors[index].mT
                totals[index] = torch.zeros_like(x, memory_format=torch.contiguous_format).mT
        graphs, ctx.graphs = ctx.graphs[::-1], []  # a second backward pass computes them again
        for block in work.blocks:
            with no_autocast(grad.device):
                if graphs:
                    leaves, attended = graphs.pop()
                else:
                    known = block.select(sums, "BHTD")
                    leaves, attended = _record(work, call, block, known)
                learnt = [leaf for leaf, y in zip(leaves, learns) if y]  # in the order of `totals`
                grads = iter(torch.autograd.grad(attended, learnt, block.select(grad, "BHTD")))
            del attended, leaves, learnt  # their memory is needed
            for total in call.select(block, totals):
                if total is not None:
                    total += next(grads)  # in place: these are views of the totals
        for index in key_fields:
            total = totals[index]
            totals[index] = None if total is None else _transpose(total.mT)
        return None, *totals


def _record(
    work: Computation, call: Operands, block: Block, sums: Tensor | None = None
) -> tuple[list[Tensor | None], Tensor]:
    """Compute a block with a graph of its own; also return the leaves of the graph."""
    leaves = [
        None if x is None or whole is None else x.detach().requires_grad_(whole.requires_grad)
        for x, whole in zip(call.select(block, call), call)
    ]
    with torch.enable_grad():
        return leaves, work.attend(Operands._make(leaves), block, sums)


def _transpose(x: Tensor) -> Tensor:
    """Transpose ``(B, H, D, n)`` to ``(B, H, n, D)``.

    As one matrix for each sentence, which torch transposes several times faster than its heads.
    """
    out = x.new_empty(x.size(0), x.size(3), x.size(1) * x.size(2))  # [B, n, H * D]
    for target, source in zip(out, x.flatten(1, 2)):  # [n, H * D], [H * D, n]
        target.copy_(source.t())
    return out.unflatten(2, (x.size(1), -1)).transpose(1, 2)  # [B, H, n, D]


def _multiply(content: Tensor, *factors: Tensor) -> Tensor:
    """Multiply content and products with rows, which may be the same for all keys or queries."""
    product: Tensor = Multiply.apply(content, *(x.expand_as(content) for x in factors))
    return product
