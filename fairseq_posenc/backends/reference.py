"""Computes the whole equation (:mod:`~fairseq_posenc.backends.equation`) at once.

It looks up the terms of all pairs and serves every encoding by plain operations, with gradients by
autograd, in O(B * H * T * S) of memory. Tests compare the other backends with it. For a single
query, as in a step of decoding, it is also the fastest: the table rows that are needed then lie in
the order of the keys.

B batch, H heads, T queries, S keys, D head size; tables have R rows, and are of G = 1 or H heads. R
is T + S - 1, a row for each distance, unless ``runs`` say which distances share a row.
With a *reset*, the pairs of each sentence's first token have two rows of their own, the last ones,
and ``first``, ``(B or 1, S)`` of bool, marks that token; else it is None.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fairseq_posenc.backends import equation
from fairseq_posenc.backends.base import AttentionCall, no_reason
from fairseq_posenc.backends.by_distance import (
    expand_numbers,
    relative_shift,
    row_index,
    sum_biases,
)
from fairseq_posenc.encodings.term import CountedRows, RowsByDistance, SinkScore, States
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.mask import NO_MASK, Mask
from fairseq_posenc.precision import at_least_fp32, no_autocast

unavailable = no_reason
CHANNELS = 8  # channels of a head whose products `_multiply_channels` holds in memory together


def refuses(call: AttentionCall) -> str:
    """Return "" to the planner: it computes every call."""
    return ""


def attend(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    """Compute attended values ``(B, H, T, D)`` and, on request, weights ``(B, H, T, S)``."""
    if call.query.size(2) > 1 or call.terms.rows("channel") is not None:
        call = call.with_all_heads()  # not for a single query: copies would take most of its time
    query, key, value, terms, mask, dropout, need_weights = call
    sink = terms.find(SinkScore)
    weights = equation.softmax(
        scores(query, key, terms, mask),
        mask.forbidden(query.size(2), key.size(2), query.device),
        None if sink is None else sink.score,
        mask.may_hide_all,
    )
    kept = F.dropout(weights, dropout) if dropout else weights
    with no_autocast(query.device):
        # Heads that share values have their queries side by side: `(B, value heads, queries, S)`.
        groups = kept.type_as(value).unflatten(1, (value.size(1), -1)).flatten(2, 3)
        attended = (groups @ value).reshape(*kept.shape[:3], value.size(3))  # [B, H, T, D]
        if (rows := terms.rows("value")) is not None:
            attended = attended + _sum_value_rows(kept, rows, terms.first, mask).type_as(value)
    return attended, weights if need_weights else None


def scores(query: Tensor, key: Tensor, terms: Terms, mask: Mask = NO_MASK) -> Tensor:
    """Compute the scores before masks and softmax, ``(B, H, T, S)`` in float32 or float64.

    The mask hides no score here. Temperatures read from it how many keys are visible, and CoPE,
    which counts positions from the content, which ones; it also has the forward pass's cache.
    """
    assert terms.rows("layer") is None, "a layer projects them first"
    sizes = query.size(2), key.size(2)
    with no_autocast(query.device):  # the product of three terms overflows fp16
        query, key = at_least_fp32(query), at_least_fp32(key)
        call = AttentionCall(query, key, key, terms, mask)  # scores need no values
        content, rows = _multiply_tokens(query, key, terms, mask)
        count, gain = None, terms.gain
        if (counted := terms.find(CountedRows)) is not None:
            table, hidden = at_least_fp32(counted.rows), mask.forbidden(*sizes, query.device)
            count = partial(equation.score_counted, query, table, hidden=hidden)  # of the content
        temperature = call.temperature()
        return equation.score(
            content,
            rows,
            product=terms.product,
            gain=None if gain is None else expand_numbers(gain, terms.first, *sizes, mask),
            scale=terms.scale(query.size(-1)),
            count_positions=count,
            biases=_list_biases(call),
            temperature=None if temperature is None else temperature[..., None],
            softcap=terms.softcap,
        )


def _list_biases(call: AttentionCall) -> Iterator[Tensor]:
    """Look up all that is added to the scaled scores of pairs."""
    query, key, terms, mask = call.query, call.key, call.terms, call.mask
    sizes = query.size(2), key.size(2)
    if (bias := sum_biases(terms, *sizes, mask)) is not None:
        yield bias
    if (states := terms.find(States)) is not None and (rows := terms.rows("state")) is not None:
        yield _multiply_pairs(at_least_fp32(states.vectors), rows, terms.first, sizes, mask)
    earlier, later = call.decay()  # c, `(B or 1, H, S, parts)` each, or None
    past = sizes[1] - sizes[0]
    if earlier is not None:
        decay = equation.subtract_sums(earlier[:, :, past:], earlier)  # c_i - c_j
        if later is not None:
            is_later = torch.ones_like(decay[0, 0], dtype=torch.bool).triu(past)
            of_later = equation.subtract_sums(later[:, :, past:], later)
            decay = torch.where(is_later, of_later, decay)  # both are 0 on the diagonal
        yield decay.to(query.dtype)


def _multiply_tokens(
    query: Tensor, key: Tensor, terms: Terms, mask: Mask
) -> tuple[Tensor, list[Tensor]]:
    """Compute the content, and the products with both tables, each ``(B, H, T, S)``.

    Keys may have fewer heads than queries, one for each group of query heads.
    """
    sizes, first = (query.size(2), key.size(2)), terms.first
    if (channels := terms.rows("channel")) is None:
        groups = query.unflatten(1, (key.size(1), -1)).flatten(2, 3)  # [B, groups, queries, D]
        content = (groups @ key.transpose(-1, -2)).reshape(*query.shape[:3], sizes[1])
    else:
        index = row_index(channels, first, *sizes, mask)
        content = _multiply_channels(query, key, at_least_fp32(channels.table), index)
    rows_of_pairs = []
    if (rows := terms.rows("query")) is not None:
        rows_of_pairs.append(_multiply_pairs(query, rows, first, sizes, mask))
    if (rows := terms.rows("key")) is not None and sizes[0] == 1:
        rows_of_pairs.append(_multiply_single_rows(key, rows, first, query.size(1), mask))
    elif rows is not None:
        rows_of_pairs.append(_multiply_pairs(key, rows, first, sizes, mask))
    return content, rows_of_pairs


def _multiply_pairs(
    x: Tensor, rows: RowsByDistance, first: Tensor | None, sizes: tuple[int, int], mask: Mask
) -> Tensor:
    """Multiply the token of each pair by the table row of the pair, ``(B, H, T, S)``.

    Args:
        x: the keys for rows of keys, else queries or their states.
        rows: the table; without ``runs``, it has a row for each distance.
        first: marks the token of a reset.
        sizes: T and S.
        mask: has the cache of the forward pass, which keeps indices for all layers.
    """
    is_of_keys = rows.of == "key"
    if first is None and rows.runs is None and x.size(2) == 1:  # rows are in the order of keys
        return _multiply_rows(x, rows.table)  # R = S
    if first is None and rows.runs is None:  # the shift finds rows without an index
        # Of a key, distances fall from query to query, so the rows are read last one first.
        table = F.pad(rows.table.flip(1) if is_of_keys else rows.table, (0, 0, 0, 1))
        pairs = relative_shift(_multiply_rows(x, table), sizes[0] if is_of_keys else sizes[1])
    else:
        index = row_index(rows, first, *sizes, mask)  # [1 or B, T, S]
        index = index.transpose(1, 2) if is_of_keys else index
        index = index[:, None].expand(*x.shape[:2], -1, -1)
        pairs = _multiply_rows(x, rows.table).gather(-1, index)
    return pairs.transpose(2, 3) if is_of_keys else pairs


def _multiply_single_rows(
    key: Tensor, rows: RowsByDistance, first: Tensor | None, num_heads: int, mask: Mask
) -> Tensor:
    """Multiply keys, perhaps of fewer heads, by their rows for a single query: ``(B, H, 1, S)``.

    Each key is read once, for the r heads of its group; r and g are 1 in a table for all heads.
    """
    groups = key.size(1) if len(rows.table) > 1 else 1  # g
    table = at_least_fp32(rows.table).unflatten(0, (groups, -1)).transpose(1, 2)  # [g, R, r, D]
    if first is None and rows.runs is None:  # rows are in the order of keys
        selected = table[None]  # R = S
    else:
        index = row_index(rows, first, 1, key.size(2), mask)[:, 0]  # [1 or B, S]
        selected = table.flatten(2).index_select(1, index.flatten()).unflatten(1, index.shape)
        selected = selected.transpose(0, 1).unflatten(-1, table.shape[2:])  # [1 or B, g, S, ...]
    products = torch.einsum("bgsrd,bgsd->bgrs", selected, key)  # [B, key heads, r, S]
    return products.expand(-1, -1, num_heads // key.size(1), -1).flatten(1, 2).unsqueeze(2)


def _sum_value_rows(
    weights: Tensor, rows: RowsByDistance, first: Tensor | None, mask: Mask
) -> Tensor:
    """Compute ``sum_j w_ij V_r``, ``(B, H, T, D)``, from weights added up by distance."""
    tgt_len, src_len = weights.shape[2:]
    index = row_index(rows, first, tgt_len, src_len, mask)
    table = at_least_fp32(rows.table)
    summed = weights.new_zeros(*weights.shape[:3], table.size(1))  # [B, H, T, R]
    return summed.scatter_add(-1, index.unsqueeze(1).expand(weights.shape), weights) @ table


def _multiply_rows(x: Tensor, table: Tensor) -> Tensor:
    """Multiply ``(B, H, T, D)`` by all rows of ``(G, R, D)``: ``(B, H, T, R)``."""
    # A matrix for all heads makes one product; as a batch of one it would be copied for each head.
    matrix = at_least_fp32(table[0] if table.size(0) == 1 else table)
    return x @ matrix.transpose(-1, -2)  # [B, H, T, R]


def _multiply_channels(query: Tensor, key: Tensor, gain: Tensor, index: Tensor) -> Tensor:
    """Sum ``q_id k_jd a_rd`` over the channels d (Huang et al. 2020): ``(B, H, T, S)``.

    No matrix product computes this. It is summed a few channels at a time, which are computed again
    for their gradient, so that no tensor has the size T * S * D.

    Args:
        query: ``(B, H, T, D)``.
        key: ``(B, H, S, D)``.
        gain: a, ``(G, R, D)``.
        index: the row r of each pair, ``(1 or B, T, S)``.
    """

    def multiply(*factors: Tensor) -> Tensor:
        content = query.new_zeros(())
        for q, k, a in zip(*(x.unbind(-1) for x in factors)):
            weighted = q[..., None] * a[:, index].transpose(0, 1)  # [B, H, T, S]
            content = content.addcmul(weighted, k[..., None, :])
        return content

    run = multiply
    if torch.is_grad_enabled():
        run = partial(checkpoint, multiply, use_reentrant=False, preserve_rng_state=False)
    chunks = zip(*(x.split(CHANNELS, -1) for x in (query, key, gain)))
    return sum((run(*factors) for factors in chunks), start=query.new_zeros(()))
