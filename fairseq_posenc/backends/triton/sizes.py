"""Compile-time options of the kernels: tile sizes and numbers of warps, by GPU generation.

They were chosen by compiling, not by timing: matrix units run at full width, and as few registers
as possible are spilled. T queries, S keys, D width of a head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fairseq_posenc.backends.triton import is_interpreted
from fairseq_posenc.backends.triton.problem import Problem

MIN_SIDE = 16  # the smallest side that a matrix in `tl.dot` may have
WIDE = 64  # wider heads take smaller tiles


class Options(NamedTuple):
    """What a kernel is compiled for; every field is a constant in the kernel."""

    M: tl.constexpr  # queries of a tile
    N: tl.constexpr  # keys of a tile
    W: tl.constexpr  # D, padded to a power of 2
    FULL: tl.constexpr  # whether all tiles are full, so that no load needs a mask
    CLIPPED: tl.constexpr  # whether the row at a table's end serves several distances
    PRODUCT: tl.constexpr  # whether the parts of a score are multiplied, not added
    SHARED: tl.constexpr  # whether queries and keys have one table


class Tile(NamedTuple):
    """The tile of a kernel, and how the kernel is compiled."""

    queries: int
    keys: int
    warps: int
    stages: int = 1  # tiles loaded ahead; more take shared memory, of which tables leave none

    def launch_options(self) -> dict[str, int]:
        """Return Triton's options of a launch."""
        return {"num_warps": self.warps, "num_stages": self.stages}


INTERPRETED = Tile(MIN_SIDE, MIN_SIDE, warps=1)
SMALL = Tile(32, 32, warps=4)  # in float32, and on generations before an H100


def choose_forward_tile(problem: Problem) -> Tile:
    """Choose the tile of the forward kernel."""
    if is_interpreted():
        return INTERPRETED
    if not _fits_large_tiles(problem):
        return SMALL
    if problem.has_vectors or problem.width > WIDE:
        return Tile(64, 64, warps=4)
    return Tile(128, 64, warps=8, stages=2)


def choose_backward_tile(problem: Problem, product: bool) -> Tile:
    """Choose the tile of the backward kernel."""
    if is_interpreted():
        return INTERPRETED
    if not _fits_large_tiles(problem):
        return SMALL
    has_both = problem.query_table is not None and problem.key_table is not None
    if product or problem.width > WIDE:
        return Tile(32, 64, warps=4)
    if has_both:
        return Tile(64, 64, warps=4)
    return Tile(64, 128, warps=8)


def _fits_large_tiles(problem: Problem) -> bool:
    """Check whether the GPU in use multiplies 64 x 64 tiles of such tensors without spilling."""
    arch = triton.runtime.driver.active.get_current_target().arch  # of AMD's GPUs a name
    is_recent = isinstance(arch, int) and arch >= 90
    return is_recent and problem.query.dtype != torch.float32


def build_options(problem: Problem, product: bool, tile: Tile) -> Options:
    """Build the compile-time options of a kernel."""
    width = max(MIN_SIDE, triton.next_power_of_2(problem.width))
    is_full = not (problem.tgt_len % tile.queries or problem.src_len % tile.keys)
    values: tuple[Any, ...] = (
        tile.queries,
        tile.keys,
        width,
        is_full and problem.width == width,
        problem.is_clipped,
        product,
        problem.query_table is not None and problem.query_table is problem.key_table,
    )
    return Options(*map(tl.constexpr, values))
