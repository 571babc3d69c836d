"""Computes blocks of a call, each as a plain function that autograd differentiates.

The function of a block is the equation; see :mod:`~fairseq_posenc.backends.equation`. Either the
graphs of all blocks are kept for the backward pass, or they are built again there, one by one. So
scores exist for one block at a time.

Shapes: k sentences and h heads of a block, M queries, W keys of a part, D head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fairseq_posenc.backends import equation
from fairseq_posenc.backends.base import refuse_second_order
from fairseq_posenc.backends.blocked.bands import (
    AddTiles,
    Band,
    BandSum,
    ByDistance,
    Multiply,
    Spread,
    view_index,
)
from fairseq_posenc.backends.blocked.geometry import Block, Part
from fairseq_posenc.backends.blocked.operands import HIDDEN, Operands, Tensors
from fairseq_posenc.backends.blocked.weights import Weigh
from fairseq_posenc.backends.forward_cache import copy_if_kept
from fairseq_posenc.encodings.precision import no_autocast


@dataclass(frozen=True)
class Computation:
    """Blocks, and what they compute of their operands.

    Attributes:
        blocks: they cover all queries.
        operands: of the whole call; its tensors are arguments of :class:`Blocks` instead.
        product: whether content and rows are multiplied, not added.
        softcap: the limit of the scores.
        dropout: the probability of dropping a weight.
        saves: whether the graphs of blocks are kept for the backward pass.
    """

    blocks: Sequence[Block]
    operands: Operands
    product: bool
    softcap: float | None
    dropout: float
    saves: bool

    def attend(self, block: Block, tensors: list[Tensors]) -> Tensor:
        """Compute the sums of values of a block, ``(k, h, M, D)``, not divided by the keep rate.

        Args:
            block: queries and parts of keys.
            tensors: those of the queries, and those of each part.
        """
        queries, *parts = tensors
        scores = [self._score(part, {**queries, **of_part}) for part, of_part in zip(block, parts)]
        if "sink" in queries:
            scores.append(queries["sink"][..., None].expand(*scores[0].shape[:3], 1))
        sums, kept = Weigh.apply(
            scores[0] if len(scores) == 1 else torch.cat(scores, -1),
            _join(parts, "value", -2),
            self.dropout,
            queries.get("query_seeds"),
            _join(parts, "key_seeds", -1) if self.dropout else None,
        )
        if "value_table" in parts[0]:
            widths = [part.keys.stop - part.keys.start for part in block]
            for part, of_part, weights in zip(block, parts, kept.split(widths, -1)):
                index = self.operands.index_rows("value_table", part)
                sums = sums + _sum_rows(weights, of_part["value_table"], index)
        return sums

    def _score(self, part: Part, t: Tensors) -> Tensor:
        """Compute the masked scores of a part, ``(k, h, M, W)``."""
        query, key = t["query"], t["key"]
        rows = [
            _multiply_rows(x, t[name], self.operands.index_rows(name, part), x is key)
            for name, x in (("query_table", query), ("key_table", key))
            if name in t
        ]
        if (
            self.product
            and "gain" not in t
            and all(x.dim() == 4 and 1 in x.shape[2:] for x in rows)
        ):
            # One row for all pairs: a factor of each query and key, and one product less.
            if "query_table" in t:
                query = query * rows[0]
            if "key_table" in t:
                key = key * rows[-1].mT
            rows = []
        content = copy_if_kept(query @ key.mT)
        count = None
        if "counted_table" in t:
            hidden = _hide_pairs(torch.zeros_like(content.detach()), t) < HIDDEN / 2

            def count(content: Tensor) -> Tensor:
                return equation.attend_counted(query, t["counted_table"], content, hidden)

        temperature = t.get("temperature")
        scores = equation.score(
            content,
            rows,
            product=self.product,
            gain=_view_pairs(t["gain"], content) if "gain" in t else None,
            count_positions=count,
            biases=self._list_biases(part, t, content),
            temperature=None if temperature is None else temperature[..., None],
            softcap=self.softcap,
            add=_add_in_place,
            multiply=_multiply,
        )
        return _hide_pairs(scores, t)

    def _list_biases(self, part: Part, t: Tensors, like: Tensor) -> list[Tensor]:
        """List all that is added to the scaled scores."""
        biases = [_view_pairs(t["bias"], like)] if "bias" in t else []
        if "pair_bias" in t:
            biases.append(t["pair_bias"])
        if "state_table" in t:
            index = self.operands.index_rows("state_table", part)
            biases.append(_multiply_rows(t["states"], t["state_table"], index, of_keys=False))
        if "query_decay" in t:
            decay = _subtract_sums(t["query_decay"], t["key_decay"], like.dtype)
            if "is_later" in t:
                later = _subtract_sums(t["query_later_decay"], t["key_later_decay"], like.dtype)
                decay = torch.where(_view_pairs(t["is_later"], like), later, decay)
            biases.append(decay)
        return biases


class Blocks(torch.autograd.Function):
    """Computes all blocks, and adds up the gradients of what they share."""

    @staticmethod
    def forward(ctx: Any, work: Computation, *tensors: Tensor) -> Tensor:
        """Compute the sums of values ``(B, H, T, D)``; ``tensors`` are those of the operands."""
        operands = work.operands.with_tensors(tensors)
        query, value = operands.queries["query"], operands.keys["value"]
        batch, heads, queries, _ = query.shape
        # fairseq's `(T, B, C)` is a view of this.
        sums = query.new_empty(queries, batch, heads, value.size(3)).permute(1, 2, 0, 3)
        ctx.graphs = []
        for block in work.blocks:
            if work.saves:
                leaves, attended = _record(work, operands, block)
                ctx.graphs.append((leaves, attended))
            else:
                attended = work.attend(block, operands.select(block))
            block[0].select(sums, "BHTD").copy_(attended.detach())
        ctx.work = work
        ctx.save_for_backward(*tensors)
        return sums

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of the operands."""
        refuse_second_order("blocked")
        work = ctx.work
        operands = work.operands.with_tensors(ctx.saved_tensors)
        totals = operands.make_zeros()
        graphs, ctx.graphs = ctx.graphs[::-1], []  # a second backward pass computes them again
        for block in work.blocks:
            with no_autocast(grad.device):
                leaves, attended = graphs.pop() if graphs else _record(work, operands, block)
                pairs = [
                    (leaf[name], total)
                    for leaf, of_part in zip(leaves, totals.select(block))
                    for name, total in of_part.items()
                ]
                learnt = [leaf for leaf, _ in pairs]
                grads = torch.autograd.grad(attended, learnt, block[0].select(grad, "BHTD"))
            del leaves, attended, learnt  # their memory is needed
            for (_, total), leaf_grad in zip(pairs, grads):
                total += leaf_grad
        return None, *operands.list_gradients(totals)


def _record(work: Computation, operands: Operands, block: Block) -> tuple[list[Tensors], Tensor]:
    """Compute a block with a graph of its own; also return the leaves of the graph."""
    leaves = [
        {name: x.detach().requires_grad_(name in learnt) for name, x in of_part.items()}
        for of_part, learnt in zip(operands.select(block), operands.list_learnt(block))
    ]
    with torch.enable_grad():
        return leaves, work.attend(block, leaves)


def _multiply_rows(x: Tensor, rows: Tensor, index: Tensor | None, of_keys: bool) -> Tensor:
    """Multiply tokens with the table rows of their pairs.

    Args:
        x: ``(k, h, n, D)``.
        rows: ``(G, M + W - 1, D)``, or distinct ones ``(G, U, D)``.
        index: which of the distinct rows each distance has, ``(M + W - 1,)``.
        of_keys: whether the tokens are keys.

    Returns:
        The numbers of all pairs; with a single row, those of the tokens. See also :class:`Band`.
    """
    if index is None and rows.size(1) > 1:
        pairs: Tensor = Band.apply(x, rows, of_keys)
        return pairs
    if of_keys:
        products = rows.expand(*x.shape[:2], *rows.shape[1:]) @ x.mT  # [k, h, U, W]
    else:
        products = x @ (rows[0] if len(rows) == 1 else rows).mT  # [k, h, M, U]
    if index is None:
        return products
    found: Tensor = Spread.apply(products, index, of_keys)
    return found


def _sum_rows(weights: Tensor, rows: Tensor, index: Tensor | None) -> Tensor:
    """Sum rows by the weights of pairs ``(k, h, M, W)``, ``(k, h, M, D)``; see above."""
    if index is None and rows.size(1) > 1:
        sums: Tensor = BandSum.apply(weights, rows)
        return sums
    if index is None:
        return weights.sum(-1, keepdim=True) * rows
    by_row = weights.new_zeros(*weights.shape[:3], rows.size(1))
    return by_row.scatter_add(3, view_index(index, weights.shape, 3), weights) @ rows


def _view_pairs(numbers: Tensor, like: Tensor) -> Tensor:
    """View numbers by distance, ``(G, M + W - 1)`` or ``(G, 1)``, as those of pairs.

    Args:
        numbers: or already those of pairs, ``(B or 1, H or 1, M, W)``.
        like: ``(k, h, M, W)``.
    """
    if numbers.dim() == 4:
        return numbers
    if numbers.size(1) == 1:
        return numbers[:, :, None]
    pairs: Tensor = ByDistance.apply(numbers, like.size(2))
    return pairs


def _hide_pairs(scores: Tensor, t: Tensors) -> Tensor:
    """Lower the scores of hidden pairs, in place."""
    if "hidden" in t:
        scores = scores.add_(_view_pairs(t["hidden"], scores))
    if "window" in t:
        is_exempt = t["first_keys"][:, :, None]  # [k, 1, 1, W]
        scores = scores.add_(_view_pairs(t["window"], scores).masked_fill(is_exempt, 0.0))
    if "key_segments" in t:
        differs = t["query_segments"][..., None].ne(t["key_segments"][:, :, None])
        scores = scores.masked_fill_(differs, HIDDEN)
    return scores.add_(t["mask"]) if "mask" in t else scores


def _subtract_sums(query_sums: Tensor, key_sums: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute the difference of two running sums for each pair, ``(k, h, M, W)``.

    The first query's sum is subtracted from both first, part by part: sums grow with the position,
    and added up, a large one would lose the small differences between neighbours.

    Args:
        query_sums: of the queries, ``(k, h, M, parts)``.
        key_sums: of the keys, ``(k, h, W, parts)``.
        dtype: of the result.
    """
    anchor = query_sums[:, :, :1].detach()
    queries, keys = ((x - anchor).sum(-1).to(dtype) for x in (query_sums, key_sums))
    return queries[..., None] - keys[:, :, None]


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


def _join(parts: list[Tensors], name: str, dim: int) -> Tensor:
    """Join a tensor of all parts along their keys."""
    found = [x[name] for x in parts if name in x]
    return found[0] if len(found) == 1 else torch.cat(found, dim)
