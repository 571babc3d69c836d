"""Rotary position embedding."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fairseq_posenc.encodings.base import Dims, Encoding, register
from fairseq_posenc.encodings.rotation import Rotation, is_exporting
from fairseq_posenc.encodings.terms import Cost
from fairseq_posenc.errors import UserError, shortened

_STRONGEST = 1_000_000  # of all factors; the longest inputs are less than so much longer


class Scaling(str):
    """The scaling of angles for inputs longer than trained: ``none`` or ``KIND:FACTOR``.

    Raises:
        UserError: neither.
    """

    def __new__(cls, text: str = "none") -> Scaling:
        """Normalise the text: ``yarn:4`` for ``yarn:4.0``, ``none`` for ``yarn:1``."""
        kind, _, factor = text.partition(":")
        try:
            if text == "none":
                return super().__new__(cls, text)
            if kind in ("linear", "ntk", "yarn") and 1 <= float(factor) <= _STRONGEST:
                number = f"{float(factor):.15g}"
                return super().__new__(cls, "none" if number == "1" else f"{kind}:{number}")
        except ValueError:
            pass
        raise UserError(
            f"rope(scaling={shortened(text)}): write none, linear:F, ntk:F or yarn:F with a factor "
            f"F of at least 1, and at most {_STRONGEST:,}: not infinite"
        )

    def parts(self) -> tuple[str, float]:
        """Split the text into kind and factor."""
        kind, _, factor = self.partition(":")
        return kind, float(factor or 1)


@register("rope")
class Rope(Encoding):
    """Queries and keys are rotated by their position, pair by pair of their coordinates.

    Equation:
        e_ij = (R_i q_i).(R_j k_j) / sqrt(c d), where R_i turns the pair (2t, 2t+1) of coordinates
        by the angle i * base^(-2t/d); so the score depends on j - i.
    Shapes:
        rotates query and key ``(B, H, T, D)``; one rotation for all layers.
    Parameters:
        0
    Source:
        Su et al. (2021), "RoFormer", arXiv:2104.09864, section 3.2.2. ``layout=half`` pairs
        coordinate t with t + d/2, as GPT-NeoX and LLaMA do. Scalings: ``linear:F`` Chen et al.
        (2023), arXiv:2306.15595; ``ntk:F`` raises the base by F^(d/(d-2)); ``yarn:F`` Peng et al.
        (2023), arXiv:2309.00071.
    Differs:
        nothing. ``fraction`` rotates only the first part of each head; ``cross_attention``, in the
        decoder of a translation model, also rotates queries by their target position and the
        source's keys by theirs.
    """

    acts_on: ClassVar[Literal["rotation"]] = "rotation"
    shared: ClassVar[bool] = True
    cost: ClassVar[Cost] = Cost("6 n C", "2 n C")
    bits: Tensor

    def __init__(
        self,
        dims: Dims,
        *,
        base: float = 10000.0,
        fraction: float = 1.0,
        layout: Literal["interleaved", "half"] = "interleaved",
        scaling: Scaling = Scaling(),  # noqa: B008  (immutable)
        cross_attention: bool = False,  # for the decoder's layers, which build that attention
    ) -> None:
        super().__init__(dims)
        self.rotated = int(fraction * dims.head_dim)
        if self.rotated < 2 or self.rotated % 2 or self.rotated > dims.head_dim:
            raise UserError(
                f"rope rotates pairs, but {fraction:g} of a head of size {dims.head_dim} is "
                f"{self.rotated} coordinates: the number must be even, and at least 2"
            )
        if base <= 1:
            raise UserError(f"{self.name}(base={base:g}): the base must be more than 1")
        self.layout = layout
        self.base = base
        self.scaling, self.factor = Scaling(scaling).parts()  # configurations hold a plain text
        if self.scaling == "ntk" and self.rotated == 2:
            raise UserError(
                f"{self.name}(scaling={scaling}) slows all pairs of coordinates but the first, and "
                f"{fraction:g} of a head of size {dims.head_dim} has one: rotate at least 4"
            )
        # As whole numbers, which `.half()` leaves alone: fp16 cannot even count beyond 2048.
        self.register_buffer("bits", self._frequencies().view(torch.int32), persistent=False)

    def trained_at(self, length: int) -> None:
        """Set the length that the weights were trained at."""
        super().trained_at(length)
        self.bits.copy_(self._frequencies().view(torch.int32))

    def rotation(self, ids: Tensor) -> Rotation:
        """Compute the rotation at positions ``ids``, ``(B or 1, T)``, in float32."""
        angles = ids[:, None, :, None] * self.frequencies  # [B or 1, 1, T, rotated/2]
        gain = 0.1 * math.log(self.factor) + 1.0 if self.scaling == "yarn" else 1.0
        return Rotation(torch.polar(torch.full_like(angles, gain), angles), self.layout == "half")

    def order(self) -> Tensor:
        """Order a head's coordinates, ``(D,)``, by the pairs that are rotated."""
        order = torch.arange(self.dims.head_dim)
        if self.layout == "half":
            order[: self.rotated] = order[: self.rotated].view(2, -1).t().flatten()
        return order

    @property
    def frequencies(self) -> Tensor:
        """The angle per position of each pair, ``(rotated / 2,)``, in float32 in any model."""
        if is_exporting():  # to formats that do not read bits as another type
            return self._frequencies()
        return self.bits.view(torch.float32)

    def _frequencies(self) -> Tensor:
        width = self.rotated
        exponents = torch.arange(0, width, 2, dtype=torch.float32) / width  # [rotated/2]
        base = self.base
        if self.scaling == "ntk":
            base *= self.factor ** (width / (width - 2))
        frequencies = base**-exponents
        if self.scaling == "linear":
            return frequencies / self.factor
        if self.scaling == "yarn":
            keep = self._yarn_ramp(width)
            return frequencies * keep + frequencies / self.factor * (1 - keep)
        return frequencies

    def _yarn_ramp(self, width: int) -> Tensor:
        """Ramp from 1 for pairs that turn often within the trained length to 0 for slow ones."""

        def pair_with(turns: float) -> float:
            length = self.dims.trained_length / (turns * 2 * math.pi)
            return width * math.log(length) / (2 * math.log(self.base))

        low = max(math.floor(pair_with(32)), 0)
        high = min(math.ceil(pair_with(1)), width - 1)
        pairs = torch.arange(width // 2, dtype=torch.float32)
        ramp = (pairs - low) / max(high - low, 0.001)
        return 1 - ramp.clamp(0, 1)

    @classmethod
    def parameter_count(cls, dims: Dims, layers: int) -> int:
        """Count none."""
        return 0
