"""Builds FlexAttention's block mask: the keys that queries may see, by tiles and by pairs.

The kernel skips tiles without a visible pair, and calls the mask of pairs for tiles that have
hidden pairs as well. Lengths are rounded up, so that few kernels are compiled.
"""

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from fairseq_posenc.backends.mask import Mask

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
    hidden = mask.forbidden(tgt_len, src_len, device)
    if hidden is None:
        hidden = torch.zeros(1, 1, 1, src_len, dtype=torch.bool, device=device)
    hidden = hidden[:, 0].expand(-1, tgt_len, -1)
    hidden = F.pad(hidden, (0, keys - src_len, 0, queries - tgt_len), value=True)
    mark_batch_dynamic(hidden)  # [B or 1, queries, keys]

    def visible_pair(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return ~hidden[index_or_zero(hidden, 0, b), i, j]

    blocks = create_block_mask(visible_pair, len(hidden), 1, queries, keys, str(device), TILE)
    lists = blocks.kv_num_blocks, blocks.kv_indices
    mark_batch_dynamic(*lists, blocks.full_kv_num_blocks, blocks.full_kv_indices)
    return blocks
