"""A tiny forward of an encoding, compared with its equation in float64."""

from __future__ import annotations

import math
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_posenc import specs
from fairseq_posenc.assembly import build_encodings
from fairseq_posenc.backends import BACKENDS
from fairseq_posenc.backends.base import AttentionCall
from fairseq_posenc.backends.mask import Mask
from fairseq_posenc.encodings.base import Dims, Encodings
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.positions import Positions, Span

DIMS = Dims(embed_dim=16, num_heads=2, max_positions=8)
LENGTH = 6
STILL = 1e-2  # a rotation that changes no dot product by more than this does nothing


@torch.no_grad()
def measure_errors(spec: str, backends: list[str], causal: bool) -> dict[str, float]:
    """Measure the largest error of a tiny forward: at the input, of rotations, on each backend."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    encodings = build_encodings(specs.parse(spec), DIMS._replace(causal=causal)).to(device)
    for parameter in encodings.parameters():
        nn.init.normal_(parameter)  # as drawn, some would be too small for a mistake to show
    tokens = torch.arange(LENGTH, device=device)[None] + 4
    positions = Positions.from_tokens(tokens, padding_idx=1, eos_idx=2, tgt_len=LENGTH)
    shape = (1, DIMS.num_heads, LENGTH, DIMS.head_dim)
    query, key, value = (torch.randn(shape, device=device) for _ in range(3))
    errors = {"the input": _measure_input_error(encodings, positions)}
    errors["rotation"] = _measure_rotation_error(encodings, query, key, positions.ids)
    query, key = _rotate(encodings, query, key, positions.ids)
    terms = encodings.terms(Span.from_lengths(LENGTH, LENGTH, device), positions)
    inputs = torch.randn(1, LENGTH, DIMS.embed_dim, device=device)
    terms = terms.with_decay(encodings.decay(inputs, positions), DIMS.num_heads)
    mask = Mask("lr" if causal else "both")
    expected = _evaluate_equation(query, key, value, terms, causal)
    served = terms.unprojected(DIMS.num_heads)
    for name in backends:
        call = AttentionCall(query, key, value, served, mask)
        if not BACKENDS[name].refuses(served, call.features):
            attended, _ = BACKENDS[name].attend(call)
            errors[name] = float((attended[0].double().cpu() - expected).abs().max())
    return errors


def _measure_input_error(encodings: Encodings, positions: Positions) -> float:
    """Check that added vectors are finite and shaped as the embeddings: 0, else infinity."""
    vectors = [encoding.embed(positions) for encoding in encodings.as_list()]
    shape = (1, LENGTH, DIMS.embed_dim)
    good = all(x is None or (x.shape == shape and bool(x.isfinite().all())) for x in vectors)
    return 0.0 if good else math.inf


def _measure_rotation_error(encodings: Encodings, query: Tensor, key: Tensor, ids: Tensor) -> float:
    """Measure the change of the products of rotated queries and keys when all of them move."""

    def products(moved: int) -> Tensor:
        q, k = (x.double().cpu() for x in _rotate(encodings, query, key, ids + moved))
        return q @ k.transpose(-1, -2)

    at_start, unrotated = products(0), (query @ key.transpose(-1, -2)).double().cpu()
    rotates = any(encoding.acts_on == "rotation" for encoding in encodings.as_list())
    if rotates and (at_start - unrotated).abs().max() < STILL:
        return math.inf  # doing nothing would pass, too
    return float((products(moved=5) - at_start).abs().max())


def _rotate(encodings: Encodings, query: Tensor, key: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate query and key at positions ``ids``."""
    rotation = encodings.rotation(ids)
    if rotation is None:
        return query, key
    return rotation.rotate_queries(query), rotation.rotate_keys(key)


def _evaluate_equation(
    query: Tensor, key: Tensor, value: Tensor, terms: Terms, causal: bool
) -> Tensor:
    """Compute attention ``(H, T, D)`` by the equation of ``encodings.terms``, on the CPU."""
    q, k, v = (x[0].double().cpu() for x in (query, key, value))
    look_up = partial(_look_up_pairs, _index_pairs(terms))
    products = q[:, :, None] * k[:, None] * look_up(terms.channel_gain, 1.0)  # [H, T, S, D]
    parts = [products.sum(-1) * look_up(terms.gain, 1.0)]
    tables = [(q[:, :, None], terms.query_table), (k[:, None], terms.key_table)]
    if terms.content_rows is not None:  # nothing projects them here; each head has its columns
        rows = terms.content_rows.unflatten(-1, (DIMS.num_heads, -1)).transpose(0, 1)
        tables += [(q[:, :, None], rows), (k[:, None], rows)]
    parts += [(x * look_up(table)).sum(-1) for x, table in tables if table is not None]
    combined = math.prod(parts) if terms.product else sum(parts)
    scores = combined / math.sqrt((terms.scale_factor or 1.0) * q.size(-1)) + look_up(terms.bias)
    if terms.pair_bias is not None:
        scores = scores + terms.pair_bias[0].double().cpu()
    if terms.counted_table is not None:
        scores = scores + _count_positions(q, scores, terms.counted_table.double().cpu())
    scores = scores + _compute_decay(terms)
    visible = torch.ones(LENGTH, LENGTH).tril() if causal else torch.ones(LENGTH, LENGTH)
    if terms.temperature is not None:
        scores = scores * terms.temperature[0, :, :, None].double().cpu()
    if terms.log_visible is not None:
        factors = terms.log_visible.double().cpu()[:, None] * visible.sum(1).log()  # [H, T]
        scores = scores * factors[..., None]
    if causal:
        scores = scores.masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -math.inf)
    if terms.sink is not None:
        column = terms.sink.double().cpu()[:, None, None].expand(-1, LENGTH, 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1)[..., :LENGTH]
    return (weights[..., None] * (v[:, None] + look_up(terms.value_table))).sum(2)


def _compute_decay(terms: Terms) -> Tensor:
    """Compute c_i - c_j, and that of later keys, ``(H or 1, T, S)``."""
    sides = [terms.decay, None if terms.later_decay is None else -terms.later_decay]
    earlier, later = (
        torch.zeros(1, 1, 1) if c is None else c[:, :, None] - c[:, None]
        for c in (None if c is None else c[0].cpu().double().sum(-1) for c in sides)
    )
    return earlier.tril() + later.triu() if terms.later_decay is not None else earlier


def _count_positions(query: Tensor, content: Tensor, table: Tensor) -> Tensor:
    """Compute the products of queries and rows between two whole positions, pair by pair."""
    products = torch.zeros_like(content)
    for h, i, j in product(*map(range, content.shape)):
        position = content[h, i, j : i + 1].sigmoid().sum().clamp(max=len(table) - 1)
        low, part = int(position), position % 1
        rows = table[[low, min(low + 1, len(table) - 1)]] @ query[h, i]  # [2]
        products[h, i, j] = (1 - part) * rows[0] + part * rows[1]
    return products


def _index_pairs(terms: Terms) -> Tensor:
    """Index the row of a table for each pair, ``(T, S)``: j - i, or one of the reset's two."""
    places = torch.arange(LENGTH)
    rows = places - places[:, None] + LENGTH - 1
    if terms.first is not None:
        rows[:, 0], rows[0] = 2 * LENGTH, 2 * LENGTH - 1
    return rows


def _look_up_pairs(rows: Tensor, table: Tensor | None, otherwise: float = 0.0) -> Any:
    """Look up a table's entries for each pair, ``(G, T, S, ...)``; a number without a table."""
    return otherwise if table is None else table.double().cpu()[:, rows]
