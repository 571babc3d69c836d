"""Lays out the tensors of a call as blocks use them: of one dtype, padded to whole tiles.

Queries are stored last one first. The letters of shapes are those of ``geometry.py``; G is H, or 1
for what all heads share, R distances, U distinct rows of a table, D head size.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_posenc.backends.base import AttentionCall
from fairseq_posenc.backends.blocked.dropout import draw_seeds
from fairseq_posenc.backends.blocked.geometry import Block, Geometry, Part, find_neighbours
from fairseq_posenc.backends.mask import Mask
from fairseq_posenc.encodings.locality import Locality
from fairseq_posenc.encodings.precision import at_least_fp32
from fairseq_posenc.encodings.terms import Terms

# Added to the score of a hidden pair: below any score. Up to three of them may hide the same pair,
# and their sum is still finite in float32.
HIDDEN = -1e38
# The tensors that a block's parts share, each with a letter for each dimension.
OF_QUERIES = {
    "query": "BHTD",  # scaled
    "states": "BHTW",
    "temperature": "BHT",
    "sink": "BHT",  # T = 1: for all queries of a head
    "counted_table": "PD",
    "query_seeds": "BH2T",  # of dropout
    "query_decay": "BHTp",  # parts whose sum is c_i
    "query_later_decay": "BHTp",
    "query_segments": "BHT",
}
# The tensors of which each part has its own.
OF_PARTS = {
    "key": "BHSD",
    "value": "BHSD",
    "query_table": "HRD",  # a row for each distance, or, if `Operands.starts` names it, "HUD"
    "key_table": "HRD",
    "value_table": "HRD",
    "state_table": "HRW",
    "gain": "HR",
    "bias": "HR",
    "pair_bias": "BHTS",
    "key_seeds": "BHS",
    "key_decay": "BHSp",
    "key_later_decay": "BHSp",
    "is_later": "HR",  # whether the key comes after the query
    "hidden": "HR",  # HIDDEN where direction or window hide, else 0
    "window": "HR",  # the same of a window that leaves `first_keys` visible
    "first_keys": "BHS",
    "key_segments": "BHS",  # a query sees keys of its segment
    "mask": "BHTS",  # HIDDEN for padding and forbidden pairs
}
PAIRS = "BHTS"  # the axes of numbers by distance that were looked up for all pairs

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Operands:
    """The tensors of a call, by the names above, and where shared rows begin.

    Attributes:
        queries: the tensors named in ``OF_QUERIES``.
        keys: those of ``OF_PARTS`` for the keys of the call.
        first: those of ``OF_PARTS`` for the first token alone, whose rows are others (a reset).
        starts: for a table with shared rows, the first distance of each row but the first.
        row_index: the row of each distance in such a table, ``(R,)``.
        lowest: the lowest distance of the call, -(S - 1).
        visible: the distances between which no direction and no window hides a key.
    """

    queries: Tensors
    keys: Tensors
    first: Tensors
    starts: dict[str, Sequence[int]]
    row_index: Tensors
    lowest: int
    visible: tuple[float, float]

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that may need gradients."""
        return [*self.queries.values(), *self.keys.values(), *self.first.values()]

    def with_tensors(self, tensors: Sequence[Tensor]) -> Operands:
        """Replace :attr:`tensors`, in their order."""
        rest = iter(tensors)
        queries, keys, first = (
            dict(zip(group, rest)) for group in (self.queries, self.keys, self.first)
        )
        return replace(self, queries=queries, keys=keys, first=first)

    def emptied(self) -> Operands:
        """Drop all tensors of :attr:`tensors`, but not their names."""
        return self.with_tensors([torch.empty(0)] * len(self.tensors))

    def make_zeros(self) -> Operands:
        """Make zeros for the gradients of the tensors that need them, without the others."""

        def make(group: Tensors) -> Tensors:
            # Gradients of keys and values are transposed, as the products that compute them are
            # faster. Others are contiguous, so that a block's part is a view.
            return {
                name: x.mT.new_zeros(x.mT.shape).mT
                if name in ("key", "value")
                else x.new_zeros(x.shape)
                for name, x in group.items()
                if x.requires_grad
            }

        return replace(
            self, queries=make(self.queries), keys=make(self.keys), first=make(self.first)
        )

    def list_gradients(self, totals: Operands) -> list[Tensor | None]:
        """List the gradients of :attr:`tensors`, given those of :meth:`make_zeros`, added up."""
        keys = {n: _transpose(x.mT) for n, x in totals.keys.items() if n in ("key", "value")}
        groups = (
            (self.queries, totals.queries),
            (self.keys, totals.keys | keys),
            (self.first, totals.first),
        )
        return [found.get(name) for group, found in groups for name in group]

    def list_learnt(self, block: Block) -> list[set[str]]:
        """List the names of the tensors of :meth:`select` that need gradients."""
        groups = [self.queries, *(self.first if part.of_first else self.keys for part in block)]
        return [{name for name, x in group.items() if x.requires_grad} for group in groups]

    def select(self, block: Block) -> list[Tensors]:
        """Select the tensors of a block's queries, and those of each of its parts, as views.

        The values and seeds of neighbouring parts are those of the first of them, as one view.
        """
        queries = {n: block[0].select(x, OF_QUERIES[n]) for n, x in self.queries.items()}
        return [queries, *(self._select_part(block, n) for n in range(len(block)))]

    def _select_part(self, block: Block, index: int) -> Tensors:
        part, neighbours = block[index], find_neighbours(block, index)
        selected = {}
        for name, x in (self.first if part.of_first else self.keys).items():
            axes = OF_PARTS[name]
            if name in ("value", "key_seeds"):
                if neighbours is not None:
                    selected[name] = neighbours.select(x, axes)
                continue
            if name == "hidden" and not part.of_first and self._sees_all(part.distances):
                continue
            if x.dim() == 4 and axes == "HR":
                axes = PAIRS
            if name in self.starts:
                rows = self.find_rows(name, part)
                x = x.narrow(1, rows.start, rows.stop - rows.start)
                axes = "HUD"
            selected[name] = part.select(x, axes)
        return selected

    def _sees_all(self, distances: slice) -> bool:
        """Check whether direction and window hide none of these distances."""
        low, high = self.lowest + distances.start, self.lowest + distances.stop - 1
        return self.visible[0] <= low and high <= self.visible[1]

    def find_rows(self, name: str, part: Part) -> slice:
        """Find the distinct rows that a part needs."""
        if part.of_first:
            return slice(0, 1)
        starts, distances = self.starts[name], part.distances
        low, high = (self.lowest + x for x in (distances.start, distances.stop - 1))
        return slice(bisect_right(starts, low), bisect_right(starts, high) + 1)

    def index_rows(self, name: str, part: Part) -> Tensor | None:
        """Index the rows of :meth:`select` by distance, ``(M + W - 1,)``; None for a single one."""
        if name not in self.row_index or part.of_first:
            return None
        rows = self.find_rows(name, part)
        if rows.stop - rows.start == 1:
            return None
        return self.row_index[name][part.distances] - rows.start


def lay_out(call: AttentionCall, geometry: Geometry) -> Operands:
    """Lay out the tensors of a call whose terms have a bias and a gain for each distance."""
    missing_queries, missing_keys = geometry.missing
    device = call.query.device
    terms, scale = _move_scale_to_table(call.terms, call.terms.scale(call.query.size(-1)))
    queries = {"query": _reverse(at_least_fp32(call.query), missing_queries) * scale}
    keys = {}
    for name, x in (("key", call.key), ("value", call.value)):
        x = F.pad(at_least_fp32(x), (0, 0, 0, missing_keys)) if missing_keys else at_least_fp32(x)
        # Sentences and heads like one dimension, so that no product has to copy them.
        keys[name] = x.reshape(-1, *x.shape[2:]).view(x.shape)
    if call.dropout:
        batch, heads, (tgt_len, src_len) = geometry.batch, geometry.heads, geometry.padded
        queries["query_seeds"] = draw_seeds(batch, heads, 2, tgt_len, device=device)
        keys["key_seeds"] = draw_seeds(batch, heads, src_len, device=device)
    for name, table in _list_tables(terms).items():
        table = table if terms.first is None else table[:, :-2]
        blank = (0, 0) * (table.dim() - 2) + (0, missing_queries + missing_keys)
        keys[name] = (F.pad(table, blank) if name not in terms.runs else table).contiguous()
    if terms.pair_bias is not None:
        keys["pair_bias"] = _reverse(at_least_fp32(terms.pair_bias), missing_queries, missing_keys)
    if terms.states is not None:
        queries["states"] = _reverse(at_least_fp32(terms.states), missing_queries)
    if (temperature := call.temperature()) is not None:
        queries["temperature"] = F.pad(at_least_fp32(temperature).flip(-1), (0, missing_queries))
    if terms.sink is not None:
        queries["sink"] = at_least_fp32(terms.sink)[None, :, None]
    if terms.counted_table is not None:  # its products are with queries that are not scaled
        queries["counted_table"] = at_least_fp32(terms.counted_table) / scale
    earlier, later = call.decay()
    if earlier is not None:
        queries["query_decay"], keys["key_decay"] = _lay_out_tokens(geometry, earlier)
    if later is not None:
        both = _lay_out_tokens(geometry, later)
        queries["query_later_decay"], keys["key_later_decay"] = both
        keys["is_later"] = geometry.distances(device) > 0
    if (segments := call.mask.locality.segments) is not None:
        both = _lay_out_tokens(geometry, segments[:, None, :, None])
        queries["query_segments"], keys["key_segments"] = (x[..., 0] for x in both)
    distances = geometry.distances(device)[0]
    return Operands(
        queries,
        keys | _lay_out_mask(call.mask, geometry, device),
        first={},
        starts={name: runs.starts for name, runs in terms.runs.items()},
        row_index={name: runs.find(distances) for name, runs in terms.runs.items()},
        lowest=1 - geometry.src_len,
        visible=_find_visible(call.mask),
    )


def separate_first(
    operands: Operands, call: AttentionCall, geometry: Geometry
) -> tuple[Operands, Operands]:
    """Separate the pairs of the first token, which have rows of their own (a reset).

    Its column of the scores becomes a part of one key in each block: among the other keys, it is
    hidden. Its row is computed as that of a single query; the blocks compute it with other rows, to
    be overwritten. Its index may differ between sentences, and is not read: a GPU does not wait.

    Returns:
        The operands of the blocks, with :attr:`Operands.first`, and those of the single query.
    """
    first, mask, device = call.terms.first, call.mask, call.query.device
    assert first is not None
    tables = _list_tables(
        _move_scale_to_table(call.terms, call.terms.scale(call.query.size(-1)))[0]
    )
    key_index = first.int().argmax(1)  # [B or 1]; 0 without a first token
    query_index = (geometry.src_len - 1 - key_index).clamp(max=geometry.padded[0] - 1)
    queries_at = geometry.query_positions(device)[None, :, None].clamp(min=0)  # [1, T, 1]
    keys_at = torch.arange(geometry.src_len, device=device)[None, None]  # [1, 1, S]
    first_at = key_index[:, None, None]
    beside = ("hidden", "window", "first_keys", "key_segments", "mask", "is_later", *tables)
    of_keys = {name: x for name, x in operands.keys.items() if name not in beside}

    hides_first = mask.hides(queries_at, first_at) | ~first.any(1)[:, None, None]
    column = {name: _take(x, OF_PARTS[name], "S", key_index) for name, x in of_keys.items()}
    column |= {name: table[:, -1:] for name, table in tables.items()}
    column["hidden"] = _hide(hides_first)[:, None]  # [B or 1, 1, T, 1]
    row = {name: _take(x, OF_PARTS[name], "T", query_index) for name, x in of_keys.items()}
    row |= {name: table[:, -2:-1] for name, table in tables.items()}
    missing_keys = (0, geometry.missing[1])
    row["hidden"] = _hide(F.pad(mask.hides(first_at, keys_at), missing_keys, value=True))[:, None]
    if "is_later" in operands.keys:
        column["is_later"] = (first_at > queries_at)[:, None]
        row["is_later"] = F.pad(keys_at > first_at, missing_keys)[:, None]
    left_out = _hide(F.pad(first, missing_keys))[:, None, None]  # [B or 1, 1, 1, S]
    if "mask" in operands.keys:
        left_out = torch.minimum(left_out, operands.keys["mask"])
    queries = {
        name: _take(x, OF_QUERIES[name], "T", query_index)
        for name, x in operands.queries.items()
        if name != "query_segments"
    }
    blocks = replace(operands, keys=operands.keys | {"mask": left_out}, first=column)
    single = replace(operands, queries=queries, keys=row, starts={}, row_index={}, visible=(1, 0))
    return blocks, single


def _find_visible(mask: Mask) -> tuple[float, float]:
    """Find the distances between which neither direction nor window hides a key."""
    reach = None if mask.locality.first_keys is not None else mask.locality.reach(mask.direction)
    far = math.inf if reach is None else reach
    return (0 if mask.direction == "rl" else -far), (0 if mask.direction == "lr" else far)


def _take(x: Tensor, axes: str, axis: str, index: Tensor) -> Tensor:
    """Select a token of each sentence from a tensor that has such an axis, by index ``(B or 1,)``.

    A dimension of size 1 is for all tokens alike.
    """
    if axis not in axes or x.size(axes.index(axis)) == 1:
        return x
    dim = axes.index(axis)
    x = x.expand(max(len(index), len(x)), *x.shape[1:])
    shape = [*x.shape[:dim], 1, *x.shape[dim + 1 :]]
    return x.gather(dim, index.reshape(-1, *[1] * (x.dim() - 1)).expand(shape))


def _list_tables(terms: Terms) -> Tensors:
    """List the tables by distance, of float32 or float64."""
    tables = ((name, x) for name, term, x in terms.present() if term.rows is not None)
    return {name: at_least_fp32(x) for name, x in tables}


def _move_scale_to_table(terms: Terms, scale: float) -> tuple[Terms, float]:
    """Multiply a table by the scale if possible; also return the factor that the queries need.

    In a sum, scaled queries scale the content and the query term, so only the table of keys is left
    to be scaled. A product is scaled once. Without tables it is a plain dot product.
    """
    if terms.key_table is not None:
        terms = terms._replace(key_table=at_least_fp32(terms.key_table) * scale)
        return terms, 1.0 if terms.product else scale
    if terms.product and terms.query_table is not None:
        return terms._replace(query_table=at_least_fp32(terms.query_table) * scale), 1.0
    return terms, scale


def _reverse(x: Tensor, missing_queries: int, missing_keys: int = 0) -> Tensor:
    """Reverse the queries of ``(..., T, n)``, and append zeros for those missing in a tile."""
    missing = (0, missing_keys, 0, missing_queries)
    return F.pad(x.flip(-2), missing) if any(missing) else x.flip(-2)


def _lay_out_tokens(geometry: Geometry, x: Tensor) -> tuple[Tensor, Tensor]:
    """Lay out ``(B or 1, G, S, n)`` as those of reversed queries and those of keys."""
    queries = _reverse(x[:, :, geometry.src_len - geometry.tgt_len :], geometry.missing[0])
    return queries, F.pad(x, (0, 0, 0, geometry.missing[1]))


def _lay_out_mask(mask: Mask, geometry: Geometry, device: torch.device) -> Tensors:
    """Lay out direction, window, padding and forbidden pairs."""
    missing_queries, missing_keys = geometry.missing
    padding_and_pairs = mask._replace(direction="both", locality=Locality())
    tensors = {}
    distances = geometry.distances(device)
    if (first_keys := mask.locality.first_keys) is not None:
        tensors["window"] = _hide(mask.mark_hidden(distances))
        tensors["first_keys"] = F.pad(first_keys, (0, missing_keys))[:, None]
        mask = mask._replace(locality=Locality())
    if mask.direction != "both" or mask.locality.window is not None:
        tensors["hidden"] = _hide(mask.mark_hidden(distances))
    forbidden = padding_and_pairs.forbidden(geometry.tgt_len, geometry.src_len, device)
    if forbidden is None and missing_keys:
        forbidden = torch.zeros(1, 1, 1, geometry.src_len, dtype=torch.bool, device=device)
    if forbidden is not None:
        hidden = _hide(F.pad(forbidden, (0, missing_keys), value=True))
        tensors["mask"] = _reverse(hidden, missing_queries) if hidden.size(2) > 1 else hidden
    return tensors


def _hide(hidden: Tensor) -> Tensor:
    """Turn a mask of bool into a bias: HIDDEN where it is True, else 0."""
    zeros = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    return zeros.masked_fill(hidden, HIDDEN)


def _transpose(x: Tensor) -> Tensor:
    """Transpose ``(B, H, D, n)`` to ``(B, H, n, D)``.

    As one matrix for each sentence, which torch transposes several times faster than its heads.
    """
    out = x.new_empty(x.size(0), x.size(3), x.size(1) * x.size(2))  # [B, n, H * D]
    for target, source in zip(out, x.flatten(1, 2)):  # [n, H * D], [H * D, n]
        target.copy_(source.t())
    return out.unflatten(2, (x.size(1), -1)).transpose(1, 2)  # [B, H, n, D]
