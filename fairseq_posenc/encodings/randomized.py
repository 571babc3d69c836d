"""Randomized positions: tokens take sorted random numbers as positions."""

from typing import Literal

import torch
from torch import Tensor

from fairseq_posenc.encodings.base import Dims, Encoding, register
from fairseq_posenc.errors import UserError
from fairseq_posenc.positions import Positions


@register("randomized")
class Randomized(Encoding):
    """Tables and rotations take sorted random numbers instead of the positions 0, 1, 2.

    Equation:
        p_i is the i-th of n numbers drawn without replacement from 0 .. ``limit`` - 1, where n is
        the model's maximum number of positions.
    Shapes:
        no tensors; the table of ``learned`` gets ``limit`` rows.
    Parameters:
        0
    Source:
        Ruoss et al. (2023), "Randomized Positional Encodings", arXiv:2305.16843, section 3.
    Differs:
        n is the model's limit, not the length of an input, so neither other sentences nor padding
        change a result, and decoding equals the full pass. Each training batch draws new numbers;
        evaluation always takes the same ones, or evenly spread ones with ``evaluation=even``.
    """

    acts_on = "positions"  # it numbers the tokens, for the other encodings
    shared_by_layers = True  # one module, which draws once for all layers
    whole_stack = True  # also layers whose part of the spec does not name it
    drawn_below: int

    def __init__(
        self, dims: Dims, *, limit: int = 2048, evaluation: Literal["drawn", "even"] = "drawn"
    ) -> None:
        super().__init__(dims)
        self.drawn_below = limit  # tables by position have a row for each of these numbers
        self.evaluation = evaluation
        self.compute_constants()  # also called whenever the lengths in `dims` change

    def number(self, positions: Positions) -> Positions:
        """Draw a number for each position; positions that have their numbers already keep them."""
        if positions.drawn is not None:
            return positions
        positions.check_limit(self.dims.max_positions, self.name)
        numbers = self._draw(positions.device) if self.training else self.fixed  # (n,)
        return positions._replace(drawn=numbers.to(positions.device)[positions.ids])

    def _draw(self, device: torch.device, generator: torch.Generator | None = None) -> Tensor:
        """Draw n numbers below the limit without replacement, and sort them."""
        numbers = torch.randperm(self.drawn_below, device=device, generator=generator)
        return numbers[: self.dims.max_positions].sort().values

    def compute_constants(self) -> None:
        """Choose the positions of evaluation, ``(n,)``, on the CPU: the same on every device."""
        length = self.dims.max_positions
        if self.drawn_below < length:
            raise UserError(
                f"randomized(limit={self.drawn_below}) must be at least {length}, the maximum "
                "number of positions of the model"
            )
        if self.evaluation == "even":
            self.fixed = torch.arange(length, device="cpu") * self.drawn_below // length
        else:
            self.fixed = self._draw(torch.device("cpu"), torch.Generator().manual_seed(0))
