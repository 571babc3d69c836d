"""Builds FlexAttention's block mask: the keys that queries may see, by tiles and by pairs.

The kernel skips tiles without a visible pair, and calls the mask of pairs for tiles that have
hidden pairs as well. Lengths are rounded up, so that few kernels are compiled.

B batch, T queries, S keys, both padded to the lengths that a kernel is compiled for.
"""

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from fairseq_posenc.backends.mask import Mask
from fairseq_posenc.encodings.locality import Locality

TILE = 128  # queries, and keys, of a tile of the block mask


def round_length(length: int) -> int:
    """Round a length up to one that kernels are compiled for.

    These are 1, for a step of decoding, multiples of 128 up to 1,024, and above that multiples of
    an eighth of the next power of two: four lengths in each doubling.
    """
    if length == 1:
        return 1
    step = max(TILE, 2 ** (length - 1).bit_length() // 8)
    return -(-length // step) * step


def mark_batch_dynamic(*tensors: Tensor | None) -> None:
    """Let one compiled kernel serve every size of the first dimension, unless that is 1."""
    for x in tensors:
        if x is not None and x.size(0) > 1 and not torch.compiler.is_compiling():
            torch._dynamo.maybe_mark_dynamic(x, 0)


def index_or_zero(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """Return the index, or zeros where the dimension has one entry for all."""
    return index if x.size(dim) > 1 else torch.zeros_like(index)


def build_block_mask(mask: Mask, tgt_len: int, src_len: int, device: torch.device) -> BlockMask:
    """Build the mask of a call, given T and S before padding."""
    queries, keys = round_length(tgt_len), round_length(src_len)
    to_keys, to_queries = (0, keys - src_len), (0, queries - tgt_len)
    segments, first_keys, pairs = mask.locality.segments, mask.locality.first_keys, mask.pairs
    hidden = mask.key_padding
    if hidden is None:
        hidden = torch.zeros(1, src_len, dtype=torch.bool, device=device)
    hidden = F.pad(hidden, to_keys, value=True)  # [B or 1, keys]
    if first_keys is not None:
        first_keys = F.pad(first_keys, to_keys)
    query_segments = key_segments = None
    if segments is not None:
        query_segments = F.pad(segments[:, src_len - tgt_len :], to_queries)
        key_segments = F.pad(segments, to_keys)
    if pairs is not None:
        pairs = F.pad(pairs, (*to_keys, *to_queries), value=True)
    by_sentence = (hidden, first_keys, query_segments, key_segments)
    mark_batch_dynamic(*by_sentence)
    # What differs from call to call is a tensor: a number would be compiled into the kernel.
    past = torch.tensor(src_len - tgt_len, device=device)
    count = torch.tensor(tgt_len, device=device)
    by_distance = Mask(mask.direction, locality=Locality(mask.locality.window))

    def visible_pair(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        exempt = None if first_keys is None else first_keys[index_or_zero(first_keys, 0, b), j]
        seen = ~by_distance.mark_hidden(j - i - past, exempt) & (i < count)
        seen = seen & ~hidden[index_or_zero(hidden, 0, b), j]
        if pairs is not None:
            seen = seen & ~pairs[i, j]
        if query_segments is not None and key_segments is not None:
            seen = seen & (
                query_segments[index_or_zero(query_segments, 0, b), i]
                == key_segments[index_or_zero(key_segments, 0, b), j]
            )
        return seen

    batch = max(len(x) for x in by_sentence if x is not None)
    blocks = create_block_mask(visible_pair, batch, 1, queries, keys, str(device), TILE)
    lists = blocks.kv_num_blocks, blocks.kv_indices
    mark_batch_dynamic(*lists, blocks.full_kv_num_blocks, blocks.full_kv_indices)
    return blocks
