"""How the tables' kernel divides its work, and how its results become gradients of tables."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_posenc.backends.triton.problem import Bands, Problem

PROGRAMS = 512  # enough to fill a GPU, few enough to keep small what they write


class Layout(NamedTuple):
    """The division of the work; it depends on shapes alone, so that sums have a fixed order.

    Attributes:
        heads: H.
        chunks: parts of the batch.
        diagonals: of blocks of queries by keys.
        block: N, the queries or keys of a block.
        before: rows of the first band that lie before the table.
        rows: R, without the reset's.
        resets: rows of the reset.
    """

    heads: int
    chunks: int
    diagonals: int
    block: int
    before: int
    rows: int
    resets: int

    @classmethod
    def of(cls, problem: Problem, block: int) -> Layout:
        """Return the division of a problem into blocks of a size."""
        blocks = [-(-length // block) for length in (problem.tgt_len, problem.src_len)]
        diagonals = sum(blocks) - 1
        wanted = -(-PROGRAMS // (diagonals * problem.heads))
        return cls(
            heads=problem.heads,
            chunks=min(problem.query.size(0), wanted),
            diagonals=diagonals,
            block=block,
            before=blocks[0] * block - problem.tgt_len,
            rows=problem.tgt_len + problem.src_len - 1,
            resets=0 if problem.first is None else 2,
        )

    @property
    def programs(self) -> int:
        """Number of programs."""
        return self.heads * self.chunks * self.diagonals

    def empty_bands(self, problem: Problem, wanted: tuple[bool, ...]) -> Bands:
        """Return room for the bands of the tables that are wanted."""
        vectors, scalars = (2 * self.block, problem.width), (4 * self.block,)
        bands: list[Tensor | None] = []
        for size, want in zip((vectors, vectors, vectors, scalars, scalars), wanted):
            shape = (self.heads, self.chunks, self.diagonals, *size)
            new = problem.query.new_empty(shape, dtype=torch.float32) if want else None
            bands.append(new)
        return Bands(*bands)

    def fold(self, bands: Bands) -> list[Tensor | None]:
        """Return the gradients of the tables by head, ``(H, R[, D])``."""
        vectors = bands.query_table, bands.key_table, bands.value_table
        scalars = bands.gain, bands.bias
        return [
            *(None if band is None else self._vectors(band) for band in vectors),
            *(None if band is None else self._scalars(band) for band in scalars),
        ]

    def _vectors(self, band: Tensor) -> Tensor:
        """Return the gradient of a table, with zeros for the reset's rows."""
        return F.pad(self._overlap(band.sum(1)), (0, 0, 0, self.resets))

    def _scalars(self, band: Tensor) -> Tensor:
        """Return the gradient of a table of scalars, with the reset's."""
        by_diagonal = band.sum(1)  # [H, diagonals, 4 * N]
        rows = self._overlap(by_diagonal[..., : 2 * self.block])
        resets = by_diagonal[..., 2 * self.block :].unflatten(-1, (2, -1)).sum((1, 3))
        return torch.cat([rows, resets[:, : self.resets]], dim=1)

    def _overlap(self, bands: Tensor) -> Tensor:
        """Add up ``(H, diagonals, 2 * N, ...)``: a band's right half is the next one's left."""
        left, right = bands.split(self.block, dim=2)
        total = bands.new_zeros(self.heads, self.diagonals + 1, *left.shape[2:])
        total[:, :-1] += left
        total[:, 1:] += right
        return total.flatten(1, 2)[:, self.before : self.before + self.rows]
