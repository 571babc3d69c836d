"""torch's FlexAttention: a fused kernel, with the terms as its ``score_mod``.

Masks are a block mask, so that tiles in which a query sees nothing are skipped. torch compiles a
kernel for each combination of terms and lengths; lengths are therefore rounded up (see
:func:`rounded_length`), and the batch is dynamic. A table of the scores costs the products of all
tokens with the rows of the visible distances, ``(B, H, T, R)``.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from fairseq_posenc.backends.base import AttentionCall, CallFeatures, Mask, score_scale
from fairseq_posenc.encodings.precision import at_least_fp32
from fairseq_posenc.encodings.terms import Terms

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

_ALL = Mask()
TILE = 128  # tokens
KERNELS = 1_000  # compiled for one machine before torch refuses more; its own limit is 8


def unavailable() -> str:
    """Explain why it cannot be compiled on this machine; empty if it can."""
    if torch.cuda.is_available() or shutil.which("g++") or shutil.which("clang++"):
        return ""
    return "torch compiles it, and found no C++ compiler (g++)"


def refuses(terms: Terms, call: CallFeatures) -> str:
    """Explain why FlexAttention cannot compute such a call; empty if it can."""
    if call.need_weights:
        return "it does not return the attention weights"
    if call.dropout:
        return "FlexAttention has no dropout of weights"
    if call.device == "cpu" and call.learns:
        return "on a CPU FlexAttention has no backward pass: train with another"
    if call.device == "cpu" and call.dtype == torch.float64:
        return "on a CPU FlexAttention has no float64"
    if call.device == "cpu" and terms.sink is not None:
        return "on a CPU FlexAttention does not say of what sum a sink takes its share"
    if terms.channel_gain is not None:
        return "a gain for each channel is inside the dot product, where score_mod does not reach"
    if terms.value_table is not None:
        return "a table of values is outside the scores"
    return ""


def attend(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    """See :class:`~fairseq_posenc.backends.base.Backend`."""
    query, key, value, terms, mask, *_ = call
    if query.device.type == "cpu" and query.size(0) > 1:  # there its code for a batch is broken
        rows = [attend(_select_sentence(call, b))[0] for b in range(query.size(0))]
        return torch.cat(rows), None
    tgt_len, src_len = query.size(2), key.size(2)
    sizes = rounded_length(tgt_len), rounded_length(src_len)
    of = (*mask[:3], *mask.locality, query.size(0), tgt_len, src_len, query.device)
    blocks = mask.cached("flex", of, lambda: _block_mask(mask, query, src_len, *sizes))
    query = F.pad(query, (0, 0, 0, sizes[0] - tgt_len))
    key, value = (F.pad(x, (0, 0, 0, sizes[1] - src_len)) for x in (key, value))
    with torch.autocast(query.device.type, enabled=False):
        modify = score_mod(
            terms, tgt_len, src_len, query.device, mask, query, key, call.temperature()
        )
        scale = score_scale(terms, query.size(-1))
        if terms.sink is None:
            attended = _run(query, key, value, modify, blocks, scale=scale)
        else:  # it takes its share of the weights
            found = _run(query, key, value, modify, blocks, scale=scale, return_lse=True)
            attended, logsumexp = found
            left = torch.sigmoid(logsumexp - at_least_fp32(terms.sink)[:, None])  # [B, H, T]
            attended = (attended * left[..., None]).type_as(value)
    return attended[:, :, :tgt_len], None


def rounded_length(length: int) -> int:
    """Round a length up to one that kernels are compiled for.

    They are 1, for a step of decoding, and multiples of a tile, from eight tiles on of an eighth of
    a power of two: at most eight kernels for each doubling.
    """
    if length == 1:
        return 1
    step = max(TILE, 1 << (length - 1).bit_length() >> 3)
    return -(-length // step) * step


def _select_sentence(call: AttentionCall, index: int) -> AttentionCall:
    def row(x: Tensor | None) -> Tensor | None:
        return x if x is None or x.size(0) == 1 else x[index : index + 1]

    terms, mask = call.terms, call.mask
    limits = mask.locality._replace(segments=row(mask.locality.segments))
    return call._replace(
        query=call.query[index : index + 1],
        key=call.key[index : index + 1],
        value=call.value[index : index + 1],
        terms=terms._replace(
            pair_bias=row(terms.pair_bias),
            first=row(terms.first),
            temperature=row(terms.temperature),
        ),
        mask=mask._replace(key_padding=row(mask.key_padding), locality=limits),
    )


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention, fullgraph=True)


def _run(
    query: Tensor, key: Tensor, value: Tensor, modify: ScoreMod, blocks: BlockMask, **more: Any
) -> Any:
    """Attend by the compiled function; ``more`` is its own."""
    if torch.compiler.is_compiling():
        return flex_attention(query, key, value, modify, blocks, **more)
    _let_vary(query, key, value)
    limits = torch._dynamo.config.patch(
        recompile_limit=KERNELS, accumulated_recompile_limit=KERNELS, automatic_dynamic_shapes=False
    )
    with limits:
        return _compiled()(query, key, value, modify, blocks, **more)


def _let_vary(*tensors: Tensor | None) -> None:
    """Let the batch of tensors vary from call to call of one kernel."""
    for x in tensors:
        if x is not None and x.size(0) > 1 and not torch.compiler.is_compiling():
            torch._dynamo.maybe_mark_dynamic(x, 0)


class _Rows(NamedTuple):
    """Where the rows of the visible distances stand in the padded tables of a call.

    Attributes:
        low: index of the first visible row in the tables of the terms.
        number: of visible rows.
        size: of the padded tables, the reset's two rows at the end included.
    """

    low: int
    number: int
    size: int

    def of(self, table: Tensor, dim: int = 1) -> Tensor:
        """Cut the visible rows out of a table, ``(G, R, ...)``, and pad them to the size."""
        table = at_least_fp32(table)
        resets = table.narrow(dim, table.size(dim) - 2, 2)
        rows = table.narrow(dim, self.low, self.number)
        gap = rows.new_zeros(1).expand(
            *rows.shape[:dim], self.size - 2 - self.number, *rows.shape[dim + 1 :]
        )
        return torch.cat([rows, gap, resets], dim)


def score_mod(
    terms: Terms,
    tgt_len: int,
    src_len: int,
    device: torch.device,
    mask: Mask = _ALL,
    query: Tensor | None = None,
    key: Tensor | None = None,
    temperature: Tensor | None = None,
) -> ScoreMod:
    """Make the function of a scaled score that FlexAttention takes.

    Args:
        terms: of the encodings, added to the scores.
        tgt_len: T.
        src_len: S.
        device: of the terms.
        mask: rows of distances that it hides are left out.
        query: ``(B, H, T, D)``, filled up to the kernel's length; for terms that have a table.
        key: ``(B, H, S, D)``, likewise.
        temperature: ``(B or 1, G, T)``, multiplies all scores of a query.
    """
    queries = tgt_len if query is None else query.size(2)
    keys = src_len if key is None else key.size(2)
    reach = mask.locality.reach(mask.direction)
    reach = src_len if reach is None else reach
    low = 0 if mask.direction == "rl" else max(-reach, 1 - src_len)
    high = 0 if mask.direction == "lr" else min(reach, tgt_len - 1)
    number = high - low + 1
    rows = _Rows(low + src_len - 1, number, rounded_length(max(number, 2)) + 2)
    # What differs from call to call is a tensor: a number would be compiled into the kernel.
    shift = torch.tensor(tgt_len - src_len - low, device=device)
    last_row = torch.tensor(number - 1, device=device)

    def products(x: Tensor | None, table: Tensor | None) -> Tensor | None:
        if x is None or table is None:
            return None
        # The scores come scaled: what is added to them has to be, and what multiplies them not.
        scale = 1.0 if terms.product else score_scale(terms, x.size(-1))
        return (at_least_fp32(x) * scale) @ rows.of(table).transpose(-1, -2)  # [B, H, T or S, R]

    by_query, by_key = products(query, terms.query_table), products(key, terms.key_table)
    gain = None if terms.gain is None else rows.of(terms.gain)
    bias = None if terms.bias is None else rows.of(terms.bias)
    pair_bias, first = terms.pair_bias, terms.first
    if pair_bias is not None:
        pair_bias = F.pad(at_least_fp32(pair_bias), (0, keys - src_len, 0, queries - tgt_len))
    if first is not None:
        first_query = F.pad(first[:, src_len - tgt_len :], (0, queries - tgt_len))
        first_key = F.pad(first, (0, keys - src_len))
        _let_vary(first_query, first_key)
    if temperature is not None:
        temperature = F.pad(temperature, (0, queries - tgt_len))
    _let_vary(by_query, by_key, pair_bias, temperature)

    def pick(table: Tensor, dim: int, index: Tensor) -> Tensor:
        return index if table.size(dim) > 1 else torch.zeros_like(index)

    def modify(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        row = (j - i + shift).clamp(min=0).minimum(last_row)  # of hidden pairs too
        if first is not None:
            row = torch.where(first_key[pick(first, 0, b), j], rows.size - 1, row)
            row = torch.where(first_query[pick(first, 0, b), i], rows.size - 2, row)
        if gain is not None:
            score = score * gain[pick(gain, 0, h), row]
        if by_query is not None:
            term = by_query[b, h, i, row]
            score = score * term if terms.product else score + term
        if by_key is not None:
            term = by_key[b, h, j, row]
            score = score * term if terms.product else score + term
        if bias is not None:
            score = score + bias[pick(bias, 0, h), row]
        if pair_bias is not None:
            score = score + pair_bias[pick(pair_bias, 0, b), pick(pair_bias, 1, h), i, j]
        if temperature is not None:
            score = score * temperature[pick(temperature, 0, b), pick(temperature, 1, h), i]
        return score

    return modify


def _block_mask(mask: Mask, query: Tensor, src_len: int, queries: int, keys: int) -> BlockMask:
    """Make the mask of padded queries and keys, by tiles and by pairs."""
    tgt_len, device = query.size(2), query.device
    ranges = mask.visible_ranges(tgt_len, src_len, device)
    segments = mask.locality.segments if ranges is None else None
    if ranges is None:
        ranges = mask._replace(locality=mask.locality._replace(segments=None)).visible_ranges(
            tgt_len, src_len, device
        )
        assert ranges is not None
    # Queries that were filled up see no key, and keys that were filled up are seen by none.
    low = F.pad(ranges[0], (0, queries - tgt_len), value=keys)  # [B or 1, T]
    high = F.pad(ranges[1], (0, queries - tgt_len), value=-1)
    hidden = mask.key_padding
    if hidden is None:
        hidden = torch.zeros(1, src_len, dtype=torch.bool, device=device)
    hidden = F.pad(hidden, (0, keys - src_len), value=True)  # [B or 1, S]
    pairs = None
    if mask.pairs is not None:
        pairs = F.pad(mask.pairs, (0, keys - src_len, 0, queries - tgt_len), value=True)
    if segments is not None:
        own = F.pad(segments[:, src_len - tgt_len :], (0, queries - tgt_len))
        segments = F.pad(segments, (0, keys - src_len))

    def tiles(x: Tensor) -> Tensor:
        return F.pad(x, (0, -x.size(1) % TILE)).unflatten(1, (-1, TILE))

    starts = torch.arange(0, keys, TILE, device=device)
    lows = F.pad(low, (0, -queries % TILE), value=keys).unflatten(1, (-1, TILE))[..., None]
    highs = F.pad(high, (0, -queries % TILE), value=-1).unflatten(1, (-1, TILE))[..., None]
    visible = (lows.amin(2) < starts + TILE) & (highs.amax(2) >= starts)  # [B or 1, tiles, tiles]
    visible = visible & ~tiles(hidden).all(2)[:, None]
    whole = (lows.amax(2) <= starts) & (highs.amin(2) >= starts + TILE - 1)
    whole = whole & visible & ~tiles(hidden).any(2)[:, None]
    if pairs is not None or segments is not None:
        whole = torch.zeros_like(whole)

    def visible_pair(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        def row(x: Tensor) -> Tensor:
            return b if x.size(0) > 1 else torch.zeros_like(b)

        seen = (j >= low[row(low), i]) & (j <= high[row(high), i]) & ~hidden[row(hidden), j]
        if pairs is not None:
            seen = seen & ~pairs[i, j]
        if segments is not None:
            seen = seen & (own[row(own), i] == segments[row(segments), j])
        return seen

    def ordered(tiles: Tensor) -> tuple[Tensor, Tensor]:
        tiles = tiles.unsqueeze(1).to(torch.int32)  # [B or 1, 1, tiles, tiles]
        number = tiles.sum(-1, dtype=torch.int32)
        return number, tiles.argsort(dim=-1, descending=True, stable=True).to(torch.int32)

    found = (*ordered(visible & ~whole), *ordered(whole))
    _let_vary(low, high, hidden, segments, *found)
    return BlockMask.from_kv_blocks(
        *found, BLOCK_SIZE=TILE, mask_mod=visible_pair, seq_lengths=(queries, keys)
    )
