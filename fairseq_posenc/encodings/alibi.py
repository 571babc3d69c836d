"""Attention with linear biases (ALiBi).

The letters of shapes are those of :mod:`~fairseq_posenc.encodings.base`.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from fairseq_posenc.encodings.base import Dims, Encoding, register
from fairseq_posenc.encodings.precision import make_constant, split_fixed, to_fixed
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.errors import UserError
from fairseq_posenc.positions import Positions, Span


@register("alibi")
class Alibi(Encoding):
    """A fixed penalty that grows with the distance is subtracted from the score.

    Equation:
        e_ij = q_i.k_j / sqrt(c d) - s_head * abs(j - i), where s_head is a geometric sequence and
        c is ``scale_factor``.
    Shapes:
        bias ``(H, R)``, for R distances; one for all layers.
    Parameters:
        0
    Source:
        Press et al. (2022), "Train Short, Test Long", arXiv:2108.12409, section 3; slopes as in
        the authors' code, even where the number of heads is not a power of two.
    Differs:
        the paper is about causal models. ``mode=symmetric`` (default in encoders) penalises later
        keys like earlier ones; ``mode=asymmetric`` gives them the slopes of the heads in
        reverse order; ``mode=causal`` (default in decoders) computes the same as ``symmetric``, but
        insists on a causal model. On several ``axes`` the penalties of all are added.
    """

    acts_on = "scores"
    takes_ids = "real"
    shared_by_layers = True

    def __init__(
        self,
        dims: Dims,
        *,
        mode: Literal["auto", "causal", "symmetric", "asymmetric"] = "auto",
        scale_factor: float = 1.0,
        axes: int = 1,
    ) -> None:
        super().__init__(dims)
        self.axes = axes
        if mode == "causal" and not dims.causal:
            raise UserError("alibi(mode=causal) needs a causal model; an encoder sees later keys")
        self.mode = mode
        self.scale_factor = scale_factor

    def terms(self, span: Span, positions: Positions) -> Terms:
        """Compute the penalties in float32, ``(H, R)``, or by pair, ``(B or 1, H, T, S)``."""
        if positions.drawn is not None:  # by the encoding `randomized`
            # Numbers that are drawn for counted tokens ascend. A caller's position ids, and the
            # numbers drawn for them, may have any order, so they are compared by pair.
            if positions.counted:
                return self._penalise_ascending(positions.drawn)
            span = span._replace(ids=positions.drawn, tgt_len=positions.tgt_len)
        return Terms.by_distance(span, self._penalise, self.scale_factor, axes=self.axes)

    def _penalise(self, distances: Tensor) -> Tensor:
        """Compute the penalty of each head at distances ``(n,)``, ``(H, n)`` in float32."""
        slopes, later_slopes = self._make_slopes(distances.device)
        slopes = torch.where(distances > 0, later_slopes[:, None], slopes[:, None])  # [H, n]
        return -slopes * distances.abs().float()

    def _penalise_ascending(self, ids: Tensor) -> Terms:
        """Penalise the distances of ascending positions p, ``(B or 1, S)``, by their decay.

        With c = -slope * p, ``Terms.decay`` adds c_i - c_j = -slope * (p_i - p_j) to the scores of
        earlier keys j, and ``Terms.later_decay`` adds c_j - c_i to those of later keys. Float32
        would round the difference of large numbers, so they are integers, split into two parts.
        Tokens have the same position on all axes, so the slopes are multiplied by their number.
        """

        def compute_decay(slopes: Tensor) -> Tensor:
            fixed = to_fixed(self.axes * slopes)  # [H]
            return split_fixed(-fixed[:, None] * ids[:, None])  # [B or 1, H, S, 2]

        slopes, later_slopes = self._make_slopes(ids.device)
        return Terms(
            decay=compute_decay(slopes),
            later_decay=None if self.dims.causal else compute_decay(later_slopes),
            scale_factor=self.scale_factor,
        )

    def _make_slopes(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Make the slopes of the heads for earlier and for later keys, ``(H,)`` each."""
        slopes = make_constant(head_slopes(self.dims.num_heads), device)
        return slopes, slopes.flip(0) if self.mode == "asymmetric" else slopes


def head_slopes(heads: int) -> list[float]:
    """Compute each head's slope: 2^(-8/p), 2^(-16/p), ... for p heads, a power of two.

    Other numbers of heads take the slopes of the power of two below, then every second slope of
    the power above.
    """
    power = 2 ** int(math.log2(heads))
    slopes = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    return slopes + [2 ** (-4 * (2 * head + 1) / power) for head in range(heads - power)]
