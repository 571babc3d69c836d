"""Attention with linear biases (ALiBi)."""

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
        e_ij = q_i.k_j / sqrt(c d) - s_head * abs(j - i), where s_head is a geometric sequence.
    Shapes:
        bias ``(H, R)``, one for all layers.
    Parameters:
        0
    Source:
        Press et al. (2022), "Train Short, Test Long", arXiv:2108.12409, section 3; slopes as in
        the authors' code, also where the number of heads is not a power of two.
    Differs:
        the paper is about causal models. ``mode=symmetric`` (default in encoders) penalises later
        keys like earlier ones; ``mode=asymmetric`` gives them the slopes of the heads in
        reverse order; ``mode=causal`` (default in decoders) insists on a causal model. On several
        ``axes`` the penalties of all are added.
    """

    acts_on = "scores"
    takes_ids = "real"
    shared = True

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
        """Compute the penalties as bias in float32, ``(H, R)``, or by pair."""
        if positions.drawn is not None and positions.counted:
            return self._penalise_drawn_positions(positions.drawn)
        if positions.drawn is not None:  # a caller's positions, and what is drawn, need not ascend
            span = span._replace(ids=positions.drawn, tgt_len=positions.tgt_len)
        return Terms.by_distance(span, self._penalise, self.scale_factor, self.axes)

    def _penalise(self, distances: Tensor) -> Tensor:
        """Compute the penalty of each head at distances ``(...)``, ``(H, ...)`` in float32."""
        slopes = make_constant(head_slopes(self.dims.num_heads), distances.device)
        slopes = slopes.view(-1, *[1] * distances.dim())  # [H, ...]
        later = slopes.flip(0) if self.mode == "asymmetric" else slopes
        return -torch.where(distances > 0, later, slopes) * distances.abs().float()

    def _penalise_drawn_positions(self, drawn: Tensor) -> Terms:
        """Penalise the distances of ascending positions ``(B or 1, S)`` by :attr:`Terms.decay`.

        The penalty slope * (p_i - p_j) is the difference of a number of the query and one of the
        key. In float32 the difference of large numbers would be inexact, so they are integers,
        split into two parts. Tokens have the same position on all axes.
        """
        slopes = make_constant(head_slopes(self.dims.num_heads), drawn.device)
        slopes = to_fixed(self.axes * slopes)  # [H]
        later = slopes.flip(0) if self.mode == "asymmetric" else slopes
        # [B, H, S, 2]
        decay, later_decay = (split_fixed(-x[:, None] * drawn[:, None]) for x in (slopes, later))
        return Terms(
            decay=decay,
            later_decay=None if self.dims.causal else later_decay,
            scale_factor=self.scale_factor,
        )


def head_slopes(heads: int) -> list[float]:
    """Compute each head's slope: 2^(-8/p), 2^(-16/p), ... for p heads, a power of two.

    Other numbers of heads take the slopes of the power of two below, then every second slope of
    the power above.
    """
    power = 2 ** int(math.log2(heads))
    slopes = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    return slopes + [2 ** (-4 * (2 * head + 1) / power) for head in range(heads - power)]
