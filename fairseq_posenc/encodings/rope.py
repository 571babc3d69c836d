"""Rotary position embedding."""

from typing import Literal

import torch
from torch import Tensor

from fairseq_posenc.encodings.base import Dims, Encoding, register
from fairseq_posenc.encodings.rope_scaling import Scaling
from fairseq_posenc.encodings.rotation import PairRotation
from fairseq_posenc.encodings.terms import Cost
from fairseq_posenc.errors import UserError


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
        coordinate t with t + d/2, as GPT-NeoX and LLaMA do. Scalings, of factor F:
        ``linear`` Chen et al. (2023), arXiv:2306.15595; ``ntk`` raises the base by F^(d/(d-2)),
        ``dynamic`` by (F n/L - F + 1)^(d/(d-2)); ``yarn`` Peng et al. (2023), arXiv:2309.00071;
        ``llama3`` Llama 3.1; ``longrope`` Ding et al. (2024), arXiv:2402.13753; ``proportional``
        Barbero et al. (2024), arXiv:2410.06205.
    Differs:
        the length n of ``dynamic`` and ``longrope`` is the model's number of positions, whatever
        the input, so that decoding equals the full pass. ``fraction`` rotates only the first part
        of each head; ``cross_attention`` also rotates, in a translation model's decoder, queries by
        their target position and the source's keys by theirs.
    """

    acts_on = "rotation"
    takes_ids = "real"
    shared = True
    cost = Cost("6 n C", "2 n C")
    frequencies: Tensor  # the angle per position of each pair, `(rotated / 2,)`, in float32

    def __init__(
        self,
        dims: Dims,
        *,
        base: float = 10000.0,
        fraction: float = 1.0,
        layout: Literal["interleaved", "half"] = "interleaved",
        scaling: Scaling = Scaling(),  # noqa: B008  (frozen)
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
        # The configuration of an exported model holds its text.
        self.scaling = Scaling.parse(scaling) if isinstance(scaling, str) else scaling
        self.scaling.check(self.name, self.rotated)
        self._compute_frequencies()

    def trained_at(self, length: int) -> None:
        """Set the length that the weights were trained at."""
        super().trained_at(length)
        self._compute_frequencies()

    def make_room(self, length: int) -> None:
        """Compute the frequencies of scalings that depend on the length."""
        self.dims = self.dims.with_room(length)
        self._compute_frequencies()

    def rotation(self, ids: Tensor) -> PairRotation:
        """Compute the rotation at positions ``ids``, ``(B or 1, T)``, in float32."""
        frequencies = self.angles_per_position().to(ids.device, non_blocking=True)
        angles = ids[:, None, :, None] * frequencies  # [B or 1, 1, T, rotated/2]
        gains = torch.full_like(angles, self.gain)
        return PairRotation(torch.polar(gains, angles), self.layout == "half")

    def angles_per_position(self) -> Tensor:
        """Select the angle by which each pair turns at a position, ``(rotated / 2,)``."""
        return self.frequencies

    def order(self) -> Tensor:
        """Order a head's coordinates, ``(D,)``, by the pairs that are rotated."""
        order = torch.arange(self.dims.head_dim)
        if self.layout == "half":
            order[: self.rotated] = order[: self.rotated].view(2, -1).t().flatten()
        return order

    def _compute_frequencies(self) -> None:
        self.frequencies = self.scaling.frequencies(self.base, self.rotated, self.dims)
        self.gain = self.scaling.gain(self.dims)
