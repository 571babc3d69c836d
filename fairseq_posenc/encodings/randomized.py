"""Randomized positions: tokens stand at numbers that are drawn, in their order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fairseq_posenc.encodings.base import Dims, Encoding, register
from fairseq_posenc.errors import UserError
from fairseq_posenc.positions import Positions

LIMIT = 2048


@register("randomized")
class Randomized(Encoding):
    """Tables and rotations take sorted random numbers in place of the positions 0, 1, 2.

    Equation:
        p_i is the i-th of n numbers drawn without replacement from 0 .. ``limit`` - 1, where n is
        the number of positions that the model has room for.
    Shapes:
        no tensors; the table of ``learned`` gets ``limit`` rows.
    Parameters:
        0
    Source:
        Ruoss et al. (2023), "Randomized Positional Encodings Boost Length Generalization of
        Transformers", arXiv:2305.16843, section 3.
    Differs:
        n is the model's limit, not the length of an input, so that neither neighbours nor padding
        change a sentence and decoding equals the full pass. In training each batch draws anew; in
        evaluation the same numbers are always taken: drawn once, or with ``evaluation=even`` spread
        evenly.
    """

    acts_on: ClassVar[Literal["positions"]] = "positions"
    shared: ClassVar[bool] = True
    whole_stack: ClassVar[bool] = True
    fixed: Tensor

    def __init__(
        self,
        dims: Dims,
        *,
        limit: int = LIMIT,
        evaluation: Literal["drawn", "even"] = "drawn",
    ) -> None:
        super().__init__(dims)
        self.limit, self.number_of_positions = limit, dims.max_positions
        if limit < self.number_of_positions:
            raise UserError(
                f"randomized(limit={limit}) must be at least the {self.number_of_positions} "
                "positions that the model has room for"
            )
        if evaluation == "even":
            fixed = torch.arange(self.number_of_positions, device="cpu") * limit
            fixed = fixed // self.number_of_positions
        else:
            fixed = self._draw(torch.device("cpu"), torch.Generator().manual_seed(0))
        self.register_buffer("fixed", fixed, persistent=False)

    def number(self, positions: Positions) -> Positions:
        """Draw a number for each position."""
        if positions.drawn is not None:
            return positions
        positions.check_limit(self.number_of_positions, self.name)
        drawn = self._draw(positions.ids.device) if self.training else self.fixed
        return positions._replace(drawn=drawn[positions.ids])

    def _draw(self, device: torch.device, generator: torch.Generator | None = None) -> Tensor:
        numbers = torch.randperm(self.limit, device=device, generator=generator)
        return numbers[: self.number_of_positions].sort().values

    @classmethod
    def drawn_from(cls, options: Iterable[tuple[str, Any]]) -> int:
        """Read the limit."""
        limit: int = dict(options).get("limit", LIMIT)
        return limit

    @classmethod
    def parameter_count(cls, dims: Dims, layers: int) -> int:
        """Count none."""
        return 0
