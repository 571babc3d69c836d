"""Sizes of tiles and numbers of warps: a table by generation of the GPU.

Found by compiling (``benchmarks/kernels.py``): matrix units run at full width, and as few registers
as possible are spilled. Times may say otherwise, once a GPU is at hand.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from fairseq_posenc.backends.triton.problem import Problem

SMALLEST = 16  # of the sizes of a matrix product
PIPELINED = 64  # wider rows of tables would fill the shared memory if two tiles of them were there


class Size(NamedTuple):
    """The sizes for a generation."""

    block: int  # queries, and keys, of a tile in half precision; float32 has 32 everywhere
    warps: int  # of a program
    # warps of a kernel whose tile results are not fed into another `tl.dot`, so they may be
    # spread over more warps
    spread_warps: int


SIZES = {8: Size(32, 2, 2), 9: Size(64, 4, 8), 10: Size(64, 8, 8)}


def size_here() -> Size:
    """Look up the sizes for the GPU in use; others have matrix units as generation 8 has."""
    arch = triton.runtime.driver.active.get_current_target().arch
    return SIZES.get(arch // 10 if isinstance(arch, int) else 8, SIZES[8])


def block_size(dtype: torch.dtype) -> int:
    """Choose the number of queries, and of keys, of a tile."""
    if _interpreted():
        return SMALLEST
    return 32 if dtype == torch.float32 else size_here().block


def padded_width(query: Tensor) -> int:
    """Round D up to a power of 2 that a matrix product can have."""
    return int(max(SMALLEST, triton.next_power_of_2(query.size(-1))))


def warps(spread: bool) -> int:
    """Choose the warps of a program, one that can be spread or one that cannot."""
    if _interpreted():
        return 1
    return size_here().spread_warps if spread else size_here().warps


def tile_options(problem: Problem) -> dict[str, Any]:
    """Choose the compile-time options of all kernels."""
    width, block = padded_width(problem.query), block_size(problem.query.dtype)
    tables = any(table is not None for table in problem[3:6])
    return {
        "FULL": not (problem.tgt_len % block or problem.src_len % block or problem.width != width),
        "N": block,
        "W": width,
        "num_warps": warps(spread=False),
        "num_stages": 1 if tables and width > PIPELINED else 2,
    }


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"
