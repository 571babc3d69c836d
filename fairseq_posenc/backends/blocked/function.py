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
    Multiply,
    multiply_all_rows,
    multiply_rows,
    replace_first,
    sum_rows,
    view_pairs,
)
from fairseq_posenc.backends.blocked.geometry import Block, Geometry, Part
from fairseq_posenc.backends.blocked.operands import HIDDEN, TensorLayout, Tensors
from fairseq_posenc.backends.blocked.weights import Weigh
from fairseq_posenc.backends.forward_cache import copy_if_kept
from fairseq_posenc.backends.mask import Mask
from fairseq_posenc.encodings.precision import no_autocast


@dataclass(frozen=True)
class Computation:
    """Blocks, and what they compute of a call's tensors.

    Attributes:
        blocks: they cover all queries.
        names: of the tensors, in the order in which :class:`Blocks` takes them.
        layout: which parts of the tensors a block needs.
        geometry: the sizes of the call.
        mask: hides pairs in addition to the tensors; see
            :func:`~fairseq_posenc.backends.blocked.operands.find_uncommon`.
        product: whether content and rows are multiplied, not added.
        softcap: the limit of the scores.
        dropout: the probability of dropping a weight.
        saves: whether the graphs of blocks are kept for the backward pass.
    """

    blocks: Sequence[Block]
    names: Sequence[str]
    layout: TensorLayout
    geometry: Geometry
    mask: Mask | None
    product: bool
    softcap: float | None
    dropout: float
    saves: bool

    def attend(self, block: Block, tensors: list[Tensors], sums: Tensor | None = None) -> Tensor:
        """Compute the sums of values of a block, ``(k, h, M, D)``, not divided by the keep rate.

        Args:
            block: queries and parts of keys.
            tensors: those of the queries, and those of each part.
            sums: the result, if it is known and only its graph is needed.
        """
        queries, *parts = tensors
        scores = [self._score(part, {**queries, **of_part}) for part, of_part in zip(block, parts)]
        if "sink" in queries:
            scores.append(queries["sink"][..., None].expand(*scores[0].shape[:3], 1))
        has_value_table = "value_table" in parts[0]
        attended, kept = Weigh.apply(
            _join(scores),
            self.dropout,
            queries.get("query_seeds"),
            _join([t["key_seeds"] for t in parts]) if self.dropout else None,
            None if has_value_table else sums,
            *(t["value"] for t in parts),
        )
        if has_value_table:
            widths = [part.keys.stop - part.keys.start for part in block]
            for part, t, weights in zip(block, parts, kept.split(widths, -1)):
                attended = attended + self._sum_value_rows(part, {**queries, **t}, weights)
        return attended

    def _score(self, part: Part, t: Tensors) -> Tensor:
        """Compute the masked scores of a part, ``(k, h, M, W)``."""
        query, key = t["query"], t["key"]
        rows = [
            self._multiply_table(name, x, part, t)
            for name, x in (("query_table", query), ("key_table", key))
            if name in t
        ]
        single = all(t[name].size(1) == 1 for name in ("query_table", "key_table") if name in t)
        if self.product and single and "gain" not in t and "first_at" not in t:
            # One row for all pairs: a factor of each query and key, and one product less.
            if "query_table" in t:
                query = query * rows[0]
            if "key_table" in t:
                key = key * rows[-1].mT
            rows = []
        temperature = t.get("temperature")
        scores = equation.score(
            copy_if_kept(query @ key.mT),
            rows,
            product=self.product,
            gain=self._look_up("gain", part, t) if "gain" in t else None,
            biases=self._list_biases(part, t),
            temperature=None if temperature is None else temperature[..., None],
            softcap=self.softcap,
            add=_add_in_place,
            multiply=_multiply,
        )
        return self._hide_pairs(scores, part, t)

    def _multiply_table(self, name: str, x: Tensor, part: Part, t: Tensors) -> Tensor:
        """Multiply queries, keys or states with the table rows of their pairs."""
        of_keys = name == "key_table"
        pairs = multiply_rows(x, t[name], self.layout.index_rows(name, part), of_keys)
        if f"{name}_reset" not in t:
            return pairs
        products = multiply_all_rows(x, t[f"{name}_reset"], of_keys)
        of_query, of_key = products.split(1, 2 if of_keys else 3)
        return replace_first(pairs, of_query, of_key, *self._mark_first(part, t))

    def _mark_first(self, part: Part, t: Tensors) -> tuple[Tensor, Tensor]:
        """Mark the first token among queries, ``(k, 1, M, 1)``, and keys, ``(k, 1, 1, W)``."""
        at = t["first_at"][:, None, None, None]
        queries, keys = self._list_places(part, at.device)
        return at == queries[:, None], at == keys

    def _list_places(self, part: Part, device: torch.device) -> tuple[Tensor, Tensor]:
        """List the indices of queries, ``(M,)``, and of keys, ``(W,)``, among all tokens."""
        queries = torch.arange(part.queries.start, part.queries.stop, device=device)
        keys = torch.arange(part.keys.start, part.keys.stop, device=device)
        return self.geometry.src_len - 1 - queries, keys

    def _look_up(self, name: str, part: Part, t: Tensors) -> Tensor:
        """Look up a number by distance for each pair, ``(k or 1, 1 or h, M, W)``."""
        pairs = view_pairs(t[name], t["query"].size(2))
        if f"{name}_reset" not in t:
            return pairs
        of_query, of_key = t[f"{name}_reset"][..., None].split(1, 1)  # each [1 or h, 1, 1]
        return replace_first(pairs, of_query, of_key, *self._mark_first(part, t))

    def _list_biases(self, part: Part, t: Tensors) -> list[Tensor]:
        """List all that is added to the scaled scores."""
        biases = [self._look_up("bias", part, t)] if "bias" in t else []
        if "pair_bias" in t:
            biases.append(t["pair_bias"])
        if "state_table" in t:
            biases.append(self._multiply_table("state_table", t["states"], part, t))
        if "query_decay" in t:
            decay = _subtract_sums(t["query_decay"], t["key_decay"], t["query"].dtype)
            if "is_later" in t:
                later = _subtract_sums(t["query_later_decay"], t["key_later_decay"], decay.dtype)
                decay = torch.where(view_pairs(t["is_later"], decay.size(2)), later, decay)
            biases.append(decay)
        return biases

    def _hide_pairs(self, scores: Tensor, part: Part, t: Tensors) -> Tensor:
        """Lower the scores of hidden pairs, in place."""
        if "hidden" in t:
            scores = scores.add_(view_pairs(t["hidden"], scores.size(2)))
        if "padding" in t:
            scores = scores.add_(t["padding"][:, :, None])
        if self.mask is None:
            return scores
        queries, keys = self._list_places(part, scores.device)
        # Those that fill the last tile take the place of the first, or last, token.
        queries, keys = queries.clamp(min=0), keys.clamp(max=self.geometry.src_len - 1)
        mask = self.mask.select_sentences(part.sentences)
        hidden = mask.hides(queries[None, :, None], keys[None, None])
        return scores.masked_fill_(hidden[:, None], HIDDEN)

    def _sum_value_rows(self, part: Part, t: Tensors, weights: Tensor) -> Tensor:
        """Sum the rows of the table of values by weights ``(k, h, M, W)``: ``(k, h, M, D)``."""
        index = self.layout.index_rows("value_table", part)
        if "value_table_reset" not in t:
            return sum_rows(weights, t["value_table"], index)
        of_query, of_key = t["value_table_reset"].split(1, 1)  # each [1 or h, 1, D]
        is_query, is_key = self._mark_first(part, t)
        by_query = (weights * is_query).sum(-1, keepdim=True)
        by_key = (weights * (is_key & ~is_query)).sum(-1, keepdim=True)
        others = sum_rows(weights.masked_fill(is_query | is_key, 0.0), t["value_table"], index)
        return others + by_query * of_query + by_key * of_key


class Blocks(torch.autograd.Function):
    """Computes all blocks, and adds up the gradients of what they share."""

    @staticmethod
    def forward(ctx: Any, work: Computation, *tensors: Tensor) -> Tensor:
        """Compute the sums of values ``(B, H, T, D)``; ``tensors`` have the names of ``work``."""
        named = dict(zip(work.names, tensors))
        batch, heads, queries, _ = named["query"].shape
        # fairseq's `(T, B, C)` is a view of this.
        sums = named["value"].new_empty(queries, batch, heads, named["value"].size(3))
        sums = sums.permute(1, 2, 0, 3)  # [B, H, T, D]
        ctx.graphs = []
        for block in work.blocks:
            if work.saves:
                leaves, attended = _record(work, named, block)
                ctx.graphs.append((leaves, attended))
            else:
                attended = work.attend(block, work.layout.select(named, block))
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
        named = dict(zip(work.names, tensors))
        totals = {name: _make_zeros(name, x) for name, x in named.items() if x.requires_grad}
        graphs, ctx.graphs = ctx.graphs[::-1], []  # a second backward pass computes them again
        for block in work.blocks:
            with no_autocast(grad.device):
                if graphs:
                    leaves, attended = graphs.pop()
                else:
                    known = block[0].select(sums, "BHTD")
                    leaves, attended = _record(work, named, block, known)
                pairs = [
                    (leaf[name], total)
                    for leaf, of_part in zip(leaves, work.layout.select(totals, block))
                    for name, total in of_part.items()
                ]
                learnt = [leaf for leaf, _ in pairs]
                grads = torch.autograd.grad(attended, learnt, block[0].select(grad, "BHTD"))
            del leaves, attended, learnt  # their memory is needed
            for (_, total), leaf_grad in zip(pairs, grads):
                total += leaf_grad
        for name in totals.keys() & {"key", "value"}:
            totals[name] = _transpose(totals[name].mT)
        return None, *(totals.get(name) for name in work.names)


def _record(
    work: Computation, tensors: Tensors, block: Block, sums: Tensor | None = None
) -> tuple[list[Tensors], Tensor]:
    """Compute a block with a graph of its own; also return the leaves of the graph."""
    leaves = [
        {name: x.detach().requires_grad_(tensors[name].requires_grad) for name, x in part.items()}
        for part in work.layout.select(tensors, block)
    ]
    with torch.enable_grad():
        return leaves, work.attend(block, leaves, sums)


def _make_zeros(name: str, x: Tensor) -> Tensor:
    """Make zeros for a gradient, of which a block's part must be a view."""
    if name in ("key", "value"):  # transposed, as the products that compute them are faster
        return x.mT.new_zeros(x.mT.shape).mT
    return x.new_zeros(x.shape)


def _transpose(x: Tensor) -> Tensor:
    """Transpose ``(B, H, D, n)`` to ``(B, H, n, D)``.

    As one matrix for each sentence, which torch transposes several times faster than its heads.
    """
    out = x.new_empty(x.size(0), x.size(3), x.size(1) * x.size(2))  # [B, n, H * D]
    for target, source in zip(out, x.flatten(1, 2)):  # [n, H * D], [H * D, n]
        target.copy_(source.t())
    return out.unflatten(2, (x.size(1), -1)).transpose(1, 2)  # [B, H, n, D]


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
    return queries[..., None] + (-keys)[:, :, None]  # a sum has the same gradient for both


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
