"""Tile sizes and numbers of warps, by GPU generation (major compute capability).

They were chosen by compiling, not by timing: matrix units run at full width, and as few registers
as possible are spilled.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from fairseq_posenc.backends.triton import is_interpreted
from fairseq_posenc.backends.triton.problem import Problem

MIN_SIDE = 16  # the smallest side that a matrix in `tl.dot` may have
MAX_PIPELINED_WIDTH = 64  # table rows up to this width fit into shared memory for two stages


class Size(NamedTuple):
    """The sizes for one generation."""

    block: int  # queries, and keys, of a tile in half precision; in float32 always 32
    warps: int  # warps of a kernel
    # warps of a kernel in which no tile goes from one `tl.dot` into another: more can share a tile
    spread_warps: int


# Major compute capability -> sizes.
SIZES = {8: Size(32, 2, 2), 9: Size(64, 4, 8), 10: Size(64, 8, 8)}


def find_size() -> Size:
    """Find the sizes for the GPU in use; those of generation 8 if it is not in the table."""
    arch = triton.runtime.driver.active.get_current_target().arch
    return SIZES.get(arch // 10 if isinstance(arch, int) else 8, SIZES[8])


def choose_block_size(dtype: torch.dtype) -> int:
    """Choose the number of queries, and of keys, of a tile."""
    if is_interpreted():
        return MIN_SIDE
    return 32 if dtype == torch.float32 else find_size().block


def pad_width(query: Tensor) -> int:
    """Round D up to a power of 2 that a matrix product can have."""
    return int(max(MIN_SIDE, triton.next_power_of_2(query.size(-1))))


def choose_warps(spread: bool) -> int:
    """Choose the number of warps of a kernel; ``spread`` as in :class:`Size`."""
    if is_interpreted():
        return 1
    return find_size().spread_warps if spread else find_size().warps


def choose_options(problem: Problem) -> dict[str, Any]:
    """Choose the compile-time options of all kernels.

    ``FULL``: all tiles are full, so no load needs a mask; ``N``: side of a tile; ``W``: padded D.
    """
    width = pad_width(problem.query)
    block = choose_block_size(problem.query.dtype)
    return {
        "FULL": not (problem.tgt_len % block or problem.src_len % block or problem.width != width),
        "N": block,
        "W": width,
        "num_warps": choose_warps(spread=False),
        "num_stages": 1 if problem.has_vectors and width > MAX_PIPELINED_WIDTH else 2,
    }
