"""Builds FlexAttention's block mask: the keys that queries may see, by tiles and by pairs.

Each query may see a range of keys. Padding, forbidden pairs, segments and first keys, which no
window hides, change that range. The kernel skips tiles without a visible pair, and calls the
mask of pairs for tiles that have hidden pairs as well.

B batch, T queries, S keys, both padded to the lengths that a kernel is compiled for.
"""

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask

from fairseq_posenc.backends.flex.sizes import TILE, index_or_zero, mark_batch_dynamic, round_length
from fairseq_posenc.backends.mask import Mask
from fairseq_posenc.encodings.locality import Locality


def build_block_mask(mask: Mask, tgt_len: int, src_len: int, device: torch.device) -> BlockMask:
    """Build the mask of a call, given T and S before padding."""
    queries, keys = round_length(tgt_len), round_length(src_len)

    def pad_ranges(ranges: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        """Pad the lowest and highest keys of queries: from ``keys`` to -1, padded ones see none."""
        assert ranges is not None, "a direction or a window alone leaves a range"
        low, high = ranges
        missing = 0, queries - tgt_len
        return F.pad(low, missing, value=keys), F.pad(high, missing, value=-1)  # [B or 1, T]

    ranges = mask.find_visible_ranges(tgt_len, src_len, device)
    segments = first_keys = query_segments = key_segments = None
    if ranges is None:  # not one range for each query: segments and first keys are treated apart
        segments = mask.locality.segments
        first_keys = mask.locality.first_keys
        window = mask.locality._replace(segments=None, first_keys=None)
        ranges = mask._replace(locality=window).find_visible_ranges(tgt_len, src_len, device)
    low, high = pad_ranges(ranges)
    hidden = mask.key_padding  # padded keys are hidden, too
    if hidden is None:
        hidden = torch.zeros(1, src_len, dtype=torch.bool, device=device)
    hidden = F.pad(hidden, (0, keys - src_len), value=True)  # [B or 1, S]
    pairs = None
    if mask.pairs is not None:
        pairs = F.pad(mask.pairs, (0, keys - src_len, 0, queries - tgt_len), value=True)
    if first_keys is not None:  # which keys a direction alone allows, the same for all sentences
        by_direction = mask._replace(locality=Locality())
        first_ranges = by_direction.find_visible_ranges(tgt_len, src_len, device)
        first_low, first_high = pad_ranges(first_ranges)
        first_keys = F.pad(first_keys, (0, keys - src_len))
    if segments is not None:
        query_segments = F.pad(segments[:, src_len - tgt_len :], (0, queries - tgt_len))
        key_segments = F.pad(segments, (0, keys - src_len))

    def split_tiles(x: Tensor, fill: int = 0) -> Tensor:  # [B or 1, n] -> [B or 1, tiles, TILE]
        return F.pad(x, (0, -x.size(1) % TILE), value=fill).unflatten(1, (-1, TILE))

    # Tiles with a visible pair, and tiles without a hidden one, which need no mask of pairs.
    starts = torch.arange(0, keys, TILE, device=device)
    lows, highs = split_tiles(low, keys)[..., None], split_tiles(high, -1)[..., None]
    visible = (lows.amin(2) < starts + TILE) & (highs.amax(2) >= starts)  # [B or 1, tiles, tiles]
    if first_keys is not None:
        visible = visible | split_tiles(first_keys).any(2)[:, None]
    visible = visible & ~split_tiles(hidden).all(2)[:, None]
    whole = (lows.amax(2) <= starts) & (highs.amin(2) >= starts + TILE - 1)
    whole = whole & visible & ~split_tiles(hidden).any(2)[:, None]
    if pairs is not None or segments is not None:  # they may hide a pair of any tile
        whole = torch.zeros_like(whole)

    def visible_pair(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = (j >= low[index_or_zero(low, 0, b), i]) & (j <= high[index_or_zero(high, 0, b), i])
        if first_keys is not None:
            is_first = first_keys[index_or_zero(first_keys, 0, b), j]
            seen = seen | (is_first & (j >= first_low[0, i]) & (j <= first_high[0, i]))
        seen = seen & ~hidden[index_or_zero(hidden, 0, b), j]
        if pairs is not None:
            seen = seen & ~pairs[i, j]
        if query_segments is not None and key_segments is not None:
            seen = seen & (
                query_segments[index_or_zero(query_segments, 0, b), i]
                == key_segments[index_or_zero(key_segments, 0, b), j]
            )
        return seen

    def count_and_sort(tiles: Tensor) -> tuple[Tensor, Tensor]:
        """Count the True tiles of each tile of queries, and list their indices before others."""
        tiles = tiles.unsqueeze(1).to(torch.int32)  # [B or 1, 1, tiles, tiles]
        count = tiles.sum(-1, dtype=torch.int32)
        return count, tiles.argsort(dim=-1, descending=True, stable=True).to(torch.int32)

    block_lists = (*count_and_sort(visible & ~whole), *count_and_sort(whole))
    mark_batch_dynamic(low, high, hidden, query_segments, key_segments, first_keys, *block_lists)
    return BlockMask.from_kv_blocks(
        *block_lists, BLOCK_SIZE=TILE, mask_mod=visible_pair, seq_lengths=(queries, keys)
    )
