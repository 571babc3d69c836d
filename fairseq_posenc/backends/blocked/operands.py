"""Lays out the tensors of a call as blocks use them: of one dtype, padded to whole tiles.

Queries are stored last one first. B batch, H heads, T queries, S keys, R distances, G tables (H, or
1 for all heads), U distinct rows of a table, D head size, W width of a state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_posenc.backends.base import AttentionCall
from fairseq_posenc.backends.blocked.dropout import draw_seeds
from fairseq_posenc.backends.blocked.geometry import Block, Geometry
from fairseq_posenc.backends.mask import Mask
from fairseq_posenc.encodings.locality import Locality
from fairseq_posenc.encodings.precision import at_least_fp32
from fairseq_posenc.encodings.runs import Runs
from fairseq_posenc.encodings.term import ByDistance, NumbersByPair, SinkScore, States

# Added to the score of a hidden pair: below any score. Two of them may hide the same pair, and
# their sum is still finite in float32.
HIDDEN = -1e38


class Operands(NamedTuple):
    """The tensors of a call, or, selected by :meth:`Layout.select`, those of a block.

    Rows have one for each distance, ``(G, R, D)``, or are distinct, ``(G, U, D)``; see
    :attr:`Layout.runs`. The two rows of a reset are for pairs of a first token as the query, and as
    the key of another query.
    """

    query: Tensor  # (B, H, T, D), scaled
    key: Tensor  # (B, H, S, D)
    value: Tensor  # (B, H, S, D)
    query_rows: Tensor | None
    key_rows: Tensor | None
    state_rows: Tensor | None  # (G, R or U, W)
    value_rows: Tensor | None
    gain: Tensor | None  # (G, R)
    bias: Tensor | None  # (G, R)
    query_reset: Tensor | None  # (G, 2, D)
    key_reset: Tensor | None  # (G, 2, D)
    gain_reset: Tensor | None  # (G, 2)
    bias_reset: Tensor | None  # (G, 2)
    first_at: Tensor | None  # (B,), the first token of a reset; below 0 for none
    pair_bias: Tensor | None  # (B, H, T, S)
    states: Tensor | None  # (B, H, T, W)
    temperature: Tensor | None  # (B, H, T)
    sink: Tensor | None  # (1, H, 1)
    query_decay: Tensor | None  # c of the queries, (B, H, T, parts)
    key_decay: Tensor | None  # c of the keys, (B, H, S, parts)
    later_query_decay: Tensor | None  # that for later keys, if they have another
    later_key_decay: Tensor | None
    query_seeds: Tensor | None  # of dropout, two for each query, (B, H, 2, T)
    key_seeds: Tensor | None  # (B, H, S)
    hidden: Tensor | None  # (1, R), HIDDEN where direction or window hide, else 0
    padding: Tensor | None  # (B, 1, S), HIDDEN for padding, else 0


# A letter for each dimension of the operands; see `Block.select`.
AXES = {
    name: axes
    for axes, names in {
        "BHTD": ["query"],
        "BHSD": ["key", "value"],
        "HRD": ["query_rows", "key_rows", "state_rows", "value_rows"],
        "HR": ["gain", "bias", "hidden"],
        "H2D": ["query_reset", "key_reset"],
        "H2": ["gain_reset", "bias_reset"],
        "B": ["first_at"],
        "BHTS": ["pair_bias"],
        "BHTW": ["states"],
        "BHT": ["temperature", "sink"],
        "BHTp": ["query_decay", "later_query_decay"],
        "BHSp": ["key_decay", "later_key_decay"],
        "BH2T": ["query_seeds"],
        "BHS": ["key_seeds", "padding"],
    }.items()
    for name in names
}


class Layout(NamedTuple):
    """What is known of a call's operands without their tensors."""

    geometry: Geometry
    runs: dict[str, Runs]  # of tables with U distinct rows, by field of `Operands`
    mask: Mask | None  # hides other pairs than `hidden` and `padding`; see `_find_uncommon`

    def select(self, operands: Sequence[Tensor | None], block: Block) -> list[Tensor | None]:
        """Select the part of each operand that a block needs, as views."""

        def select(name: str, x: Tensor | None) -> Tensor | None:
            axes = AXES[name].replace("R", "U") if name in self.runs else AXES[name]
            return None if x is None else block.select(x, axes)

        return list(map(select, Operands._fields, operands))


def name_operands(tensors: Iterable[Tensor | None]) -> Operands:
    """Name the operands of a list, in the order of the fields."""
    return Operands(*tensors)  # type: ignore[arg-type]  # query, key and value are never None


def lay_out(call: AttentionCall, geometry: Geometry) -> tuple[Operands, Layout]:
    """Lay out the tensors of a call whose terms have a bias and a gain for each distance."""
    missing_queries, missing_keys = geometry.missing
    device, terms, mask = call.query.device, call.terms, call.mask
    scale = terms.scale(call.query.size(-1))
    # In a sum, the scale is in the queries and in the rows of keys; in a product, in one factor.
    scaled = terms.rows("key")
    if terms.product and scaled is None:
        scaled = terms.rows("query")
    query = _reverse(call.query, missing_queries)

    def fill_tiles(x: Tensor) -> Tensor:
        x = F.pad(at_least_fp32(x), (0, 0, 0, missing_keys)) if missing_keys else at_least_fp32(x)
        # Sentences and heads like one dimension, so that no product has to copy them.
        return x.reshape(-1, *x.shape[2:]).view(x.shape)

    found: dict[str, Tensor | None] = dict.fromkeys(Operands._fields)
    found["query"] = query if terms.product and scaled is not None else query * scale
    found["key"], found["value"] = fill_tiles(call.key), fill_tiles(call.value)
    tables: dict[str, ByDistance | None] = {
        **{f"{of}_rows": terms.rows(of) for of in ("query", "key", "state", "value")},
        **{"gain": terms.gain, "bias": terms.bias},
    }
    runs = {name: x.runs for name, x in tables.items() if x is not None and x.runs is not None}
    for name, term in tables.items():
        if term is None:
            continue
        rows = at_least_fp32(term.table)
        rows = rows * scale if term is scaled else rows
        if terms.first is not None:
            rows, reset = rows.split([rows.size(1) - 2, 2], 1)
            found[f"{name.removesuffix('_rows')}_reset"] = reset
        if term.runs is None:  # in dimension 1, rows for the distances of padded tokens
            rows = F.pad(rows, (0, 0) * (rows.dim() - 2) + (0, missing_queries + missing_keys))
        found[name] = rows.contiguous()
    if call.dropout:
        shape, (tgt_len, src_len) = (geometry.batch, geometry.heads), geometry.padded
        found["query_seeds"] = draw_seeds(*shape, 2, tgt_len, device=device)
        found["key_seeds"] = draw_seeds(*shape, src_len, device=device)
    if (first := terms.first) is not None:
        at = first.int().argmax(1)  # a tensor: reading it would wait for a GPU
        found["first_at"] = at.masked_fill(~first.any(1), -geometry.padded[1] - 1)  # no place
    if (by_pair := terms.find(NumbersByPair)) is not None:
        found["pair_bias"] = _reverse(by_pair.numbers, missing_queries, missing_keys)
    if (vectors := terms.find(States)) is not None:
        found["states"] = _reverse(vectors.vectors, missing_queries)
    if (factors := call.temperature()) is not None:
        found["temperature"] = _reverse(factors[..., None], missing_queries).squeeze(-1)
    if (score := terms.find(SinkScore)) is not None:
        found["sink"] = at_least_fp32(score.score)[None, :, None]
    for prefix, decay in zip(("", "later_"), call.decay()):
        if decay is not None:
            of_queries = decay[:, :, geometry.src_len - geometry.tgt_len :]
            found[f"{prefix}query_decay"] = _reverse(of_queries, missing_queries)
            found[f"{prefix}key_decay"] = F.pad(decay, (0, 0, 0, missing_keys))
    # A window with first keys, which it does not hide, is not laid out by distance.
    by_distance = mask.direction != "both" or mask.locality.window is not None
    if by_distance and mask.locality.first_keys is None:
        found["hidden"] = _hide(mask.mark_hidden(geometry.distances(device)))[None]
    if mask.key_padding is not None or missing_keys:
        padding = mask.key_padding
        if padding is None:
            padding = torch.zeros(1, geometry.src_len, dtype=torch.bool, device=device)
        found["padding"] = _hide(F.pad(padding, (0, missing_keys), value=True))[:, None]
    return name_operands(found.values()), Layout(geometry, runs, _find_uncommon(mask))


def _find_uncommon(mask: Mask) -> Mask | None:
    """Find the part of a mask that is not laid out: segments, first keys and forbidden pairs."""
    locality = mask.locality
    if locality.first_keys is not None:
        return mask._replace(key_padding=None, cache=None)
    if locality.segments is None and mask.pairs is None:
        return None
    return Mask(pairs=mask.pairs, locality=Locality(segments=locality.segments))


def _hide(hidden: Tensor) -> Tensor:
    """Turn a mask of bool into a bias: HIDDEN where it is True, else 0."""
    zeros = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    return zeros.masked_fill(hidden, HIDDEN)


def _reverse(x: Tensor, missing_queries: int, missing_keys: int = 0) -> Tensor:
    """Reverse the queries of ``(..., T, n)``, and append zeros for those missing in a tile."""
    missing = (0, missing_keys, 0, missing_queries)
    x = at_least_fp32(x).flip(-2)
    return F.pad(x, missing) if any(missing) else x
