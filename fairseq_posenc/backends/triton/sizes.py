"""Tile sizes and numbers of warps, by GPU generation (major compute capability).

They were chosen by compiling, not by timing: matrix units run at full width, and as few registers
as possible are spilled. T queries, S keys, D width of a head.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from fairseq_posenc.backends.triton import is_interpreted
from fairseq_posenc.backends.triton.problem import Problem

MIN_SIDE = 16  # the smallest side that a matrix in `tl.dot` may have
MAX_PIPELINED_WIDTH = 64  # vectors of tables up to it fit into shared memory for two stages


class Size(NamedTuple):
    """The sizes for one generation."""

    block: int  # queries, and keys, of a tile in half precision
    warps: int  # warps of a kernel that passes the result of one `tl.dot` to another
    independent_warps: int  # warps of other kernels: there more of them can share a tile


# Major compute capability -> sizes.
SIZES = {
    8: Size(block=32, warps=2, independent_warps=2),
    9: Size(block=64, warps=4, independent_warps=8),
    10: Size(block=64, warps=8, independent_warps=8),
}


def find_size() -> Size:
    """Find the sizes for the GPU in use; those of generation 8 if it is not in the table."""
    arch = triton.runtime.driver.active.get_current_target().arch  # of AMD's GPUs a name
    return SIZES.get(arch // 10, SIZES[8]) if isinstance(arch, int) else SIZES[8]


def choose_block_size(dtype: torch.dtype) -> int:
    """Choose the number of queries, and of keys, of a tile."""
    if is_interpreted():
        return MIN_SIDE
    return 32 if dtype == torch.float32 else find_size().block


def pad_width(query: Tensor) -> int:
    """Round D up to a power of 2 that a matrix product can have."""
    return int(max(MIN_SIDE, triton.next_power_of_2(query.size(-1))))


def choose_warps(independent: bool) -> int:
    """Choose the number of warps of a kernel.

    Args:
        independent: whether the kernel never passes the result of one ``tl.dot`` to another.
    """
    if is_interpreted():
        return 1
    return find_size().independent_warps if independent else find_size().warps


def choose_options(problem: Problem) -> dict[str, Any]:
    """Choose the compile-time options of all kernels.

    ``FULL``: all tiles are full, so no load needs a mask; ``N``: side of a tile; ``W``: padded D.
    Kernels with independent products replace ``num_warps``.
    """
    width = pad_width(problem.query)
    block = choose_block_size(problem.query.dtype)
    return {
        "FULL": not (problem.tgt_len % block or problem.src_len % block or problem.width != width),
        "N": block,
        "W": width,
        "num_warps": choose_warps(independent=False),
        "num_stages": 1 if problem.has_vectors and width > MAX_PIPELINED_WIDTH else 2,
    }
