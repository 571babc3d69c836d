"""Lays out the tensors of a call as blocks use them: of one dtype, padded to whole tiles.

Queries are stored last one first. The letters of shapes are those of ``geometry.py``; G is H, or 1
for what all heads share, R distances, U distinct rows of a table, D head size.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_posenc.backends.base import AttentionCall
from fairseq_posenc.backends.blocked.dropout import draw_seeds
from fairseq_posenc.backends.blocked.geometry import Block, Geometry, Part
from fairseq_posenc.backends.mask import Mask
from fairseq_posenc.encodings.locality import Locality
from fairseq_posenc.encodings.precision import at_least_fp32
from fairseq_posenc.encodings.runs import Runs
from fairseq_posenc.encodings.term import ByDistance, NumbersByPair, SinkScore, States

# Added to the score of a hidden pair: below any score. Two of them may hide the same pair, and
# their sum is still finite in float32.
HIDDEN = -1e38
# The tensors that a block's parts share, each with a letter for each dimension.
OF_QUERIES = {
    "query": "BHTD",  # scaled
    "states": "BHTW",
    "temperature": "BHT",
    "sink": "BHT",  # T = 1: for all queries of a head
    "query_seeds": "BH2T",  # of dropout
    "query_decay": "BHTp",  # parts whose sum is c_i
    "query_later_decay": "BHTp",
    "first_at": "B",  # where the key of a reset's first token is; below 0 if there is none
}
# The tensors of which each part has its own.
OF_PARTS = {
    "key": "BHSD",
    "value": "BHSD",
    "query_table": "HRD",  # a row for each distance, or, if `TensorLayout.starts` names it, "HUD"
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
    "padding": "BHS",  # HIDDEN for padding, else 0
}
# The two rows that each table has for pairs of the first token, of its query and of its key.
OF_QUERIES |= {
    f"{name}_reset": axes.replace("R", "2") for name, axes in OF_PARTS.items() if "HR" in axes
}

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class TensorLayout:
    """Which parts of a call's tensors a block needs.

    Attributes:
        starts: for a table with shared rows, the first distance of each row but the first.
        row_index: for such a table, the row of each distance, ``(R,)``.
        lowest: the call's lowest distance.
    """

    starts: dict[str, Sequence[int]]
    row_index: Tensors
    lowest: int

    def select(self, tensors: Tensors, block: Block) -> list[Tensors]:
        """Select the tensors of a block's queries, and those of each of its parts, as views."""
        queries = {
            name: block[0].select(x, OF_QUERIES[name])
            for name, x in tensors.items()
            if name in OF_QUERIES
        }
        return [queries, *(self._select_part(tensors, part) for part in block)]

    def _select_part(self, tensors: Tensors, part: Part) -> Tensors:
        selected = {}
        for name, x in tensors.items():
            if name not in OF_PARTS:
                continue
            axes = OF_PARTS[name]
            if name in self.starts:
                rows = self._find_rows(name, part)
                x = x.narrow(1, rows.start, rows.stop - rows.start)
                axes = "HUD"
            selected[name] = part.select(x, axes)
        return selected

    def _find_rows(self, name: str, part: Part) -> slice:
        """Find the distinct rows that a part needs."""
        starts, distances = self.starts[name], part.distances
        low, high = (self.lowest + x for x in (distances.start, distances.stop - 1))
        return slice(bisect_right(starts, low), bisect_right(starts, high) + 1)

    def index_rows(self, name: str, part: Part) -> Tensor | None:
        """Index the rows of :meth:`select` by distance, ``(M + W - 1,)``; None for a single one."""
        if name not in self.starts:
            return None
        rows = self._find_rows(name, part)
        if rows.stop - rows.start == 1:
            return None
        return self.row_index[name][part.distances] - rows.start


def lay_out(call: AttentionCall, geometry: Geometry) -> tuple[Tensors, TensorLayout]:
    """Lay out the tensors of a call whose terms have a bias and a gain for each distance."""
    missing_queries, missing_keys = geometry.missing
    device = call.query.device
    terms, scale = call.terms, call.terms.scale(call.query.size(-1))
    product = terms.product
    # Scaled queries scale the sum of terms but the products of keys; a product is scaled once.
    scaled = terms.rows("key")
    if product and scaled is None:
        scaled = terms.rows("query")
    in_table = product and scaled is not None
    query = _reverse(at_least_fp32(call.query), missing_queries)
    tensors = {"query": query if in_table else query * scale}
    for name, x in (("key", call.key), ("value", call.value)):
        x = F.pad(at_least_fp32(x), (0, 0, 0, missing_keys)) if missing_keys else at_least_fp32(x)
        # Sentences and heads like one dimension, so that no product has to copy them.
        tensors[name] = x.reshape(-1, *x.shape[2:]).view(x.shape)
    if call.dropout:
        batch, heads, (tgt_len, src_len) = geometry.batch, geometry.heads, geometry.padded
        tensors["query_seeds"] = draw_seeds(batch, heads, 2, tgt_len, device=device)
        tensors["key_seeds"] = draw_seeds(batch, heads, src_len, device=device)
    shared_rows: dict[str, Runs] = {}
    for term in terms:
        if not isinstance(term, ByDistance):
            continue
        table = at_least_fp32(term.table) * scale if term is scaled else at_least_fp32(term.table)
        if terms.first is not None:
            table, tensors[f"{term.name}_reset"] = table.split([table.size(1) - 2, 2], 1)
        if term.runs is None:
            blank = (0, 0) * (table.dim() - 2) + (0, missing_queries + missing_keys)
            table = F.pad(table, blank)
        else:
            shared_rows[term.name] = term.runs
        tensors[term.name] = table.contiguous()
    if (by_pair := terms.find(NumbersByPair)) is not None:
        pair_bias = at_least_fp32(by_pair.numbers)
        tensors["pair_bias"] = _reverse(pair_bias, missing_queries, missing_keys)
    if (states := terms.find(States)) is not None:
        tensors["states"] = _reverse(at_least_fp32(states.vectors), missing_queries)
    if (temperature := call.temperature()) is not None:
        tensors["temperature"] = _reverse(
            at_least_fp32(temperature)[..., None], missing_queries
        ).squeeze(-1)
    if (sink := terms.find(SinkScore)) is not None:
        tensors["sink"] = at_least_fp32(sink.score)[None, :, None]
    earlier, later = call.decay()
    if earlier is not None:
        tensors["query_decay"], tensors["key_decay"] = _lay_out_tokens(geometry, earlier)
    if later is not None:
        both = _lay_out_tokens(geometry, later)
        tensors["query_later_decay"], tensors["key_later_decay"] = both
        tensors["is_later"] = geometry.distances(device)[None] > 0
    if (first := terms.first) is not None:
        found = first.int().argmax(1)  # a tensor: reading it would wait for a GPU
        tensors["first_at"] = found.masked_fill(~first.any(1), -geometry.padded[1] - 1)
    distances = geometry.distances(device)
    layout = TensorLayout(
        starts={name: runs.starts for name, runs in shared_rows.items()},
        row_index={name: runs.find(distances) for name, runs in shared_rows.items()},
        lowest=1 - geometry.src_len,
    )
    return tensors | _lay_out_mask(call.mask, geometry, device), layout


def find_uncommon(mask: Mask) -> Mask | None:
    """Find the part of a mask that is not laid out: segments, first keys and forbidden pairs.

    Returns:
        A mask to be called for the pairs of each block, or None if there is nothing of the kind.
    """
    locality = mask.locality
    if locality.first_keys is not None:  # a window that does not hide them is not laid out, either
        return mask._replace(key_padding=None, cache=None)
    if locality.segments is None and mask.pairs is None:
        return None
    return Mask(pairs=mask.pairs, locality=Locality(segments=locality.segments))


def _lay_out_mask(mask: Mask, geometry: Geometry, device: torch.device) -> Tensors:
    """Lay out direction, window and padding."""
    tensors = {}
    if mask.locality.first_keys is None and (
        mask.direction != "both" or mask.locality.window is not None
    ):
        tensors["hidden"] = hide(mask.mark_hidden(geometry.distances(device)))[None]
    padding, missing_keys = mask.key_padding, geometry.missing[1]
    if padding is None and missing_keys:
        padding = torch.zeros(1, geometry.src_len, dtype=torch.bool, device=device)
    if padding is not None:
        tensors["padding"] = hide(F.pad(padding, (0, missing_keys), value=True))[:, None]
    return tensors


def hide(hidden: Tensor) -> Tensor:
    """Turn a mask of bool into a bias: HIDDEN where it is True, else 0."""
    zeros = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    return zeros.masked_fill(hidden, HIDDEN)


def _reverse(x: Tensor, missing_queries: int, missing_keys: int = 0) -> Tensor:
    """Reverse the queries of ``(..., T, n)``, and append zeros for those missing in a tile."""
    missing = (0, missing_keys, 0, missing_queries)
    return F.pad(x.flip(-2), missing) if any(missing) else x.flip(-2)


def _lay_out_tokens(geometry: Geometry, x: Tensor) -> tuple[Tensor, Tensor]:
    """Lay out ``(B or 1, G, S, n)`` as those of reversed queries and those of keys."""
    queries = _reverse(x[:, :, geometry.src_len - geometry.tgt_len :], geometry.missing[0])
    return queries, F.pad(x, (0, 0, 0, geometry.missing[1]))
