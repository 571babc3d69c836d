"""Computes blocks of a call, each as a plain function that autograd differentiates.

The function of a block is the equation; see :mod:`~fairseq_posenc.backends.equation`. Either the
graphs of all blocks are kept for the backward pass, or they are built again there, one by one. So
scores exist for one block at a time.

Shapes: k sentences and h heads of a block, M queries, W keys of a part, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fairseq_posenc.backends import equation
from fairseq_posenc.backends.base import refuse_second_order
from fairseq_posenc.backends.blocked.bands import (
    AddTiles,
    Multiply,
    multiply_all_rows,
    multiply_rows,
    replace_first,
    sum_rows,
    view_pairs,
)
from fairseq_posenc.backends.blocked.geometry import Block, Geometry, Part
from fairseq_posenc.backends.blocked.operands import HIDDEN, Operands, RowTable, map_tensors
from fairseq_posenc.backends.blocked.weights import Weigh
from fairseq_posenc.backends.forward_cache import copy_if_kept
from fairseq_posenc.backends.mask import Mask
from fairseq_posenc.encodings.precision import no_autocast

# A tensor of a block's own graph, the index of the call's tensor of which it is a part, and a
# function that selects the same part of that tensor's gradient.
Leaf = tuple[Tensor, int, Callable[[Tensor], Tensor]]


class View:
    """What a part takes of the call's tensors: views, or leaves of a graph.

    Args:
        part: queries and keys of some sentences and heads.
        leaves: where to list the leaves; None without a graph.
        indices: of the call's tensors, by ``id``.
    """

    def __init__(self, part: Part, leaves: list[Leaf] | None, indices: dict[int, int]) -> None:
        self.part, self.leaves, self.indices = part, leaves, indices

    def take(self, x: Tensor, axes: str, rows: slice | None = None) -> Tensor:
        """Take the part of a tensor.

        Args:
            x: one of the call's tensors.
            axes: a letter for each dimension; see :meth:`Part.select`.
            rows: those of the second dimension; by default all.
        """

        def select(x: Tensor) -> Tensor:
            return self.part.select(x if rows is None else x[:, rows], axes)

        if self.leaves is None:
            return select(x)
        leaf = select(x.detach()).requires_grad_(x.requires_grad)
        if x.requires_grad:
            self.leaves.append((leaf, self.indices[id(x)], select))
        return leaf

    def take_rows(self, table: RowTable) -> tuple[Tensor, Tensor | None]:
        """Take the rows of a table of vectors, and, if distances share them, the row of each."""
        if table.index is None:
            return self.take(table.rows, "HRD"), None
        rows = table.find_rows(self.part)
        taken = self.take(table.rows, "HUD", rows)
        return taken, None if taken.size(1) == 1 else table.index[self.part.distances] - rows.start


@dataclass(frozen=True)
class Computation:
    """Blocks, and what they compute of a call's tensors.

    Attributes:
        blocks: they cover all queries.
        operands: the call's, without their tensors.
        geometry: the sizes of the call.
        mask: hides pairs in addition to the tensors; see
            :func:`~fairseq_posenc.backends.blocked.operands.find_uncommon`.
        product: whether content and rows are multiplied, not added.
        softcap: the limit of the scores.
        dropout: the probability of dropping a weight.
        saves: whether the graphs of blocks are kept for the backward pass.
    """

    blocks: Sequence[Block]
    operands: Operands
    geometry: Geometry
    mask: Mask | None
    product: bool
    softcap: float | None
    dropout: float
    saves: bool

    def fill(self, tensors: Iterable[Tensor]) -> Operands:
        """Put the tensors of the call back into its operands."""
        remaining = iter(tensors)
        operands: Operands = map_tensors(self.operands, lambda _: next(remaining))
        return operands

    def attend(self, views: Sequence[View], x: Operands, sums: Tensor | None = None) -> Tensor:
        """Compute the sums of values of a block, ``(k, h, M, D)``, not divided by the keep rate.

        Args:
            views: those of the block's parts.
            x: the operands of the call.
            sums: the result, if it is known and only its graph is needed.
        """
        scores = [self._score(view, x) for view in views]
        if x.sink is not None:
            sink = views[0].take(x.sink, "BHT")[..., None]
            scores.append(sink.expand(*scores[0].shape[:3], 1))
        query_seeds = key_seeds = None
        if x.seeds is not None:
            query_seeds = views[0].take(x.seeds[0], "BH2T")
            key_seeds = _join([view.take(x.seeds[1], "BHS") for view in views])
        table = x.value_rows
        attended, kept = Weigh.apply(
            _join(scores),
            self.dropout,
            query_seeds,
            key_seeds,
            sums if table is None else None,
            *(view.take(x.value, "BHSD") for view in views),
        )
        if table is not None:
            widths = [view.part.keys.stop - view.part.keys.start for view in views]
            for view, weights in zip(views, kept.split(widths, -1)):
                attended = attended + self._sum_value_rows(view, x, table, weights)
        return attended

    def _score(self, view: View, x: Operands) -> Tensor:
        """Compute the masked scores of a part, ``(k, h, M, W)``."""
        query, key, rows = view.take(x.query, "BHTD"), view.take(x.key, "BHSD"), []
        if x.query_rows is not None:
            rows.append(self._multiply_rows(query, x.query_rows, view, x))
        if x.key_rows is not None:
            rows.append(self._multiply_rows(key, x.key_rows, view, x, of_keys=True))
        if self.product and x.gain is None and all(1 in pairs.shape[-2:] for pairs in rows):
            # One row for all pairs: a factor of each query and key, and one product less.
            query = query if x.query_rows is None else query * rows[0]
            key = key if x.key_rows is None else key * rows[-1].mT
            rows = []
        temperature = None
        if x.temperature is not None:
            temperature = view.take(x.temperature, "BHT")[..., None]
        scores = equation.score(
            copy_if_kept(query @ key.mT),
            rows,
            product=self.product,
            gain=None if x.gain is None else self._look_up(x.gain, view, x),
            biases=self._list_biases(view, x),
            temperature=temperature,
            softcap=self.softcap,
            add=_add_in_place,
            multiply=_multiply,
        )
        return self._hide_pairs(scores, view, x)

    def _multiply_rows(
        self, tokens: Tensor, table: RowTable, view: View, x: Operands, of_keys: bool = False
    ) -> Tensor:
        """Multiply queries, keys or states with the table rows of their pairs."""
        pairs = multiply_rows(tokens, *view.take_rows(table), of_keys)
        if table.reset is None:
            return pairs
        products = multiply_all_rows(tokens, view.take(table.reset, "H2D"), of_keys)
        of_query, of_key = products.split(1, 2 if of_keys else 3)
        return replace_first(pairs, of_query, of_key, *self._mark_first(view, x))

    def _look_up(self, table: RowTable, view: View, x: Operands) -> Tensor:
        """Look up a number by distance for each pair, ``(k or 1, 1 or h, M, W)``."""
        queries = view.part.queries
        pairs = view_pairs(view.take(table.rows, "HR"), queries.stop - queries.start)
        if table.reset is None:
            return pairs
        of_query, of_key = view.take(table.reset, "H2")[..., None].split(1, 1)  # [1 or h, 1, 1]
        return replace_first(pairs, of_query, of_key, *self._mark_first(view, x))

    def _mark_first(self, view: View, x: Operands) -> tuple[Tensor, Tensor]:
        """Mark the first token among queries, ``(k, 1, M, 1)``, and keys, ``(k, 1, 1, W)``."""
        assert x.first_at is not None, "it comes with the rows of a reset"
        at = view.take(x.first_at, "B")[:, None, None, None]
        queries, keys = self._list_places(view.part, at.device)
        return at == queries[:, None], at == keys

    def _list_places(self, part: Part, device: torch.device) -> tuple[Tensor, Tensor]:
        """List the indices of queries, ``(M,)``, and of keys, ``(W,)``, among all tokens."""
        queries = torch.arange(part.queries.start, part.queries.stop, device=device)
        keys = torch.arange(part.keys.start, part.keys.stop, device=device)
        return self.geometry.src_len - 1 - queries, keys

    def _list_biases(self, view: View, x: Operands) -> list[Tensor]:
        """List all that is added to the scaled scores."""
        biases = [] if x.bias is None else [self._look_up(x.bias, view, x)]
        if x.pair_bias is not None:
            biases.append(view.take(x.pair_bias, "BHTS"))
        if x.state_rows is not None and x.states is not None:
            states = view.take(x.states, "BHTW")
            biases.append(self._multiply_rows(states, x.state_rows, view, x))
        if x.decay is not None:
            decay = self._subtract_decay(x.decay, view, x)
            if x.later_decay is not None:
                queries, keys = self._list_places(view.part, decay.device)
                is_later = keys > queries[:, None]
                decay = torch.where(is_later, self._subtract_decay(x.later_decay, view, x), decay)
            biases.append(decay)
        return biases

    def _subtract_decay(self, sums: tuple[Tensor, Tensor], view: View, x: Operands) -> Tensor:
        """Compute the difference of two running sums for each pair, ``(k, h, M, W)``.

        The first query's sum is subtracted from both first, part by part: sums grow with the
        position, and added up, a large one would lose the small differences between neighbours.
        """
        query_sums, key_sums = view.take(sums[0], "BHTp"), view.take(sums[1], "BHSp")
        anchor = query_sums[:, :, :1].detach()
        queries, keys = ((c - anchor).sum(-1).to(x.query.dtype) for c in (query_sums, key_sums))
        return queries[..., None] + (-keys)[:, :, None]  # a sum has the same gradient for both

    def _hide_pairs(self, scores: Tensor, view: View, x: Operands) -> Tensor:
        """Lower the scores of hidden pairs, in place."""
        if x.hidden is not None:
            scores = scores.add_(view_pairs(view.take(x.hidden, "HR"), scores.size(2)))
        if x.padding is not None:
            scores = scores.add_(view.take(x.padding, "BHS")[:, :, None])
        if self.mask is None:
            return scores
        queries, keys = self._list_places(view.part, scores.device)
        # Those that fill the last tile take the place of the first, or last, token.
        queries, keys = queries.clamp(min=0), keys.clamp(max=self.geometry.src_len - 1)
        mask = self.mask.select_sentences(view.part.sentences)
        hidden = mask.hides(queries[:, None], keys[None])
        return scores.masked_fill_(hidden[:, None], HIDDEN)

    def _sum_value_rows(self, view: View, x: Operands, table: RowTable, weights: Tensor) -> Tensor:
        """Sum the rows of the table of values by weights ``(k, h, M, W)``: ``(k, h, M, D)``."""
        rows, index = view.take_rows(table)
        if table.reset is None:
            return sum_rows(weights, rows, index)
        of_query, of_key = view.take(table.reset, "H2D").split(1, 1)  # each [1 or h, 1, D]
        is_query, is_key = self._mark_first(view, x)
        by_query = (weights * is_query).sum(-1, keepdim=True)
        by_key = (weights * (is_key & ~is_query)).sum(-1, keepdim=True)
        others = sum_rows(weights.masked_fill(is_query | is_key, 0.0), rows, index)
        return others + by_query * of_query + by_key * of_key


class Blocks(torch.autograd.Function):
    """Computes all blocks, and adds up the gradients of what they share."""

    @staticmethod
    def forward(ctx: Any, work: Computation, *tensors: Tensor) -> Tensor:
        """Compute the sums of values ``(B, H, T, D)``; ``tensors`` are those of the operands."""
        operands = work.fill(tensors)
        batch, heads, queries, _ = operands.query.shape
        # fairseq's `(T, B, C)` is a view of this.
        sums = operands.value.new_empty(queries, batch, heads, operands.value.size(3))
        sums = sums.permute(1, 2, 0, 3)  # [B, H, T, D]
        ctx.graphs = []
        for block in work.blocks:
            if work.saves:
                leaves, attended = _record(work, tensors, block)
                ctx.graphs.append((leaves, attended))
            else:
                attended = work.attend([View(part, None, {}) for part in block], operands)
            block[0].select(sums, "BHTD").copy_(attended.detach())
        ctx.work = work
        ctx.save_for_backward(sums, *tensors)
        return sums

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of the tensors."""
        refuse_second_order("blocked")
        work = ctx.work
        sums, *tensors = ctx.saved_tensors
        totals = [x.new_zeros(x.shape if x.requires_grad else 0) for x in tensors]
        for index in (1, 2):  # of keys and values, transposed: the products for them are faster
            totals[index] = tensors[index].mT.new_zeros(tensors[index].mT.shape).mT
        graphs, ctx.graphs = ctx.graphs[::-1], []  # a second backward pass computes them again
        for block in work.blocks:
            with no_autocast(grad.device):
                if graphs:
                    leaves, attended = graphs.pop()
                else:
                    known = block[0].select(sums, "BHTD")
                    leaves, attended = _record(work, tensors, block, known)
                learnt = [leaf for leaf, _, _ in leaves]
                grads = torch.autograd.grad(attended, learnt, block[0].select(grad, "BHTD"))
            del attended, learnt  # their memory is needed
            for (_, index, select), leaf_grad in zip(leaves, grads):
                total = select(totals[index])
                total += leaf_grad
            del leaves
        totals[1:3] = [_transpose(x.mT) for x in totals[1:3]]
        return None, *(x if y.requires_grad else None for x, y in zip(totals, tensors))


def _record(
    work: Computation, tensors: Sequence[Tensor], block: Block, sums: Tensor | None = None
) -> tuple[list[Leaf], Tensor]:
    """Compute a block with a graph of its own; also return the leaves of the graph."""
    leaves: list[Leaf] = []
    indices = {id(x): index for index, x in enumerate(tensors)}
    with torch.enable_grad():
        views = [View(part, leaves, indices) for part in block]
        return leaves, work.attend(views, work.fill(tensors), sums)


def _transpose(x: Tensor) -> Tensor:
    """Transpose ``(B, H, D, n)`` to ``(B, H, n, D)``.

    As one matrix for each sentence, which torch transposes several times faster than its heads.
    """
    out = x.new_empty(x.size(0), x.size(3), x.size(1) * x.size(2))  # [B, n, H * D]
    for target, source in zip(out, x.flatten(1, 2)):  # [n, H * D], [H * D, n]
        target.copy_(source.t())
    return out.unflatten(2, (x.size(1), -1)).transpose(1, 2)  # [B, H, n, D]


def _add_in_place(pairs: Tensor, others: Tensor) -> Tensor:
    """Add numbers of pairs, or the tiles of a :class:`Band`, in place."""
    if others.dim() == 5:
        added: Tensor = AddTiles.apply(pairs, others)
        return added
    return pairs.add_(others)


def _multiply(content: Tensor, *factors: Tensor) -> Tensor:
    """Multiply numbers of pairs, or the tiles of a :class:`Band`."""
    # Copied into contiguous memory once, since they are read several times.
    factors = tuple(x.flatten(2, 3) if x.dim() == 5 else x for x in factors)
    if factors and all(x.shape == content.shape for x in factors):
        product: Tensor = Multiply.apply(content, *factors)
        return product
    return equation.multiply_all(content, *factors)


def _join(tensors: list[Tensor]) -> Tensor:
    """Join a tensor of all parts along their keys."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, -1)
