"""Functions of the distance of a key, added to the score (ALiBi, KERPLE, Sandwich, FIRE).

B batch, T queries, S keys, H heads, R distances; in formulas m layers, h heads, d head size.
"""

import math
from abc import ABC, abstractmethod
from typing import Literal

import torch
from torch import Tensor, nn

from fairseq_posenc.encodings.base import Dims, Encoding, register
from fairseq_posenc.encodings.term import Decay, NumbersByDistance, NumbersByPair, Term
from fairseq_posenc.errors import UserError
from fairseq_posenc.positions import Positions, subtract_ids
from fairseq_posenc.precision import make_constant, no_autocast, split_fixed, to_fixed

MIN_PARAMETER = 1e-2  # kerple's r1 and r2 are clamped to it, as in the authors' code
LEAST = 1e-8  # the least value of fire's a and L, so that no logarithm is 0


class Bias(Encoding, ABC):
    """Base class: a function of the distance (on several axes its sum) is added to the score."""

    acts_on = "scores"

    @abstractmethod
    def bias(self, distances: Tensor) -> Tensor:
        """Compute the function of each head at distances j - i, ``(n,)``, as ``(H, n)``."""

    def terms(self, positions: Positions) -> list[Term]:
        """Add the function by distance, ``(H, R)``, or by pair, ``(B or 1, H, T, S)``."""
        # ALiBi alone has several axes, and random positions, for which it overrides this method.
        if positions.consecutive:  # distances are those of indices, and the same on all axes
            return [NumbersByDistance(self.axes * self.bias(positions.distances()))]
        # Positions of the keys minus those of the queries, the last T: [B or 1, T, S (, axes)]
        distances = subtract_ids(positions.ids, positions.tgt_len)
        pairs = self.bias(distances.flatten()).unflatten(1, distances.shape).transpose(0, 1)
        has_axes = positions.ids.dim() == 3  # otherwise, a token's only id is for all axes
        return [NumbersByPair(pairs.sum(-1) if has_axes else self.axes * pairs)]


@register("alibi")
class Alibi(Bias):
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
        the paper is about causal models. In encoders, ``mode=symmetric`` penalizes later keys like
        earlier ones; ``mode=asymmetric`` gives them the slopes of the heads in reverse order. On
        several ``axes`` the penalties of all are added.
    """

    takes_real_ids = True  # positions may be numbers such as 0.5
    shared_by_layers = True  # one module, called once in a pass

    def __init__(
        self,
        dims: Dims,
        *,
        mode: Literal["symmetric", "asymmetric"] = "symmetric",
        scale_factor: float = 1.0,
        axes: int = 1,
    ) -> None:
        super().__init__(dims, scale_factor)
        self.axes, self.mode = axes, mode

    def terms(self, positions: Positions) -> list[Term]:
        """Subtract the penalties by distance, by pair, or by token."""
        if positions.drawn is not None:  # by the encoding `randomized`
            # Numbers that are drawn for counted tokens ascend. A caller's position ids, and the
            # numbers drawn for them, may have any order, so they are compared by pair.
            if positions.counted:
                return [self._penalize_ascending(positions.drawn)]
            positions = positions._replace(ids=positions.drawn, consecutive=False)
        return super().terms(positions)

    def bias(self, distances: Tensor) -> Tensor:
        """Compute minus the penalty of each head at distances ``(n,)``, ``(H, n)`` in float32."""
        slopes, later_slopes = self._make_slopes(distances.device)
        slopes = torch.where(distances > 0, later_slopes[:, None], slopes[:, None])  # [H, n]
        return -slopes * distances.abs().float()

    def _penalize_ascending(self, ids: Tensor) -> Decay:
        """Penalize the distances of ascending positions p, ``(B or 1, S)``, by their decay.

        With c = -slope * p, the scores of earlier keys j get c_i - c_j = -slope * (p_i - p_j), and
        later keys get c_j - c_i. Float32 would round the difference of large numbers, so they
        are integers, split into two parts. Tokens have the same position on all axes, so the slopes
        are multiplied by the number of axes.
        """
        slopes, later_slopes = self._make_slopes(ids.device)
        sides = [slopes] if self.dims.causal else [slopes, later_slopes]
        fixed = [to_fixed(self.axes * side)[:, None] for side in sides]  # [H, 1] each
        return Decay(*(split_fixed(-side * ids[:, None]) for side in fixed))  # [B or 1, H, S, 2]

    def _make_slopes(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Make the slopes of the heads for earlier and for later keys, ``(H,)`` each.

        They are 2^(-8/p), 2^(-16/p), ... for p heads, a power of two. Other numbers of heads take
        the slopes of the power of two below, then every second slope of the power above.
        """
        heads = self.dims.num_heads
        power = 2 ** int(math.log2(heads))
        numbers = [2 ** (-8 * (head + 1) / power) for head in range(power)]
        numbers += [2 ** (-8 * (2 * head + 1) / (2 * power)) for head in range(heads - power)]
        slopes = make_constant(numbers, device)
        return slopes, slopes.flip(0) if self.mode == "asymmetric" else slopes


@register("kerple")
class Kerple(Bias):
    """A trained penalty that grows with the logarithm of the distance is subtracted.

    Equation:
        e_ij = q_i.k_j / sqrt(c d) - r1 * log(1 + r2 * abs(j - i)), where r1 and r2 are
        positive and trained for each head.
    Shapes:
        r1 and r2 ``(H,)`` in each layer.
    Parameters:
        m * 2 * h
    Source:
        Chi et al. (2022), "KERPLE", arXiv:2205.09921, the logarithmic variant.
    Differs:
        r1 starts uniform in (0, 2), r2 in (0, 1); both are kept at 0.01 or more.
    """

    takes_real_ids = True

    def __init__(self, dims: Dims, *, scale_factor: float = 1.0) -> None:
        super().__init__(dims, scale_factor)
        self.r1 = nn.Parameter(torch.empty(dims.num_heads))  # drawn by `reset_parameters`
        self.r2 = nn.Parameter(torch.empty(dims.num_heads))

    def reset_parameters(self) -> None:
        """Draw r1 and r2."""
        nn.init.uniform_(self.r1, 0, 2)
        nn.init.uniform_(self.r2, 0, 1)

    def bias(self, distances: Tensor) -> Tensor:
        """Compute minus the penalty of each head at distances ``(n,)``, in float32 at least."""
        distances = distances.abs().to(torch.promote_types(self.r1.dtype, torch.float32))
        r1, r2 = (x.clamp(min=MIN_PARAMETER)[:, None] for x in (self.r1, self.r2))  # [H, 1] each
        return -r1 * torch.log1p(r2 * distances)


@register("sandwich")
class Sandwich(Bias):
    """The dot product of both positions' sinusoids is added, with a smaller factor in later heads.

    Equation:
        e_ij = q_i.k_j / sqrt(c d) + H / (8 t) * (sum_s cos((j - i) / 10000^(2s/w)) - w / 2),
        where s = 1 .. w/2 and t = 1 .. H numbers the heads.
    Shapes:
        bias ``(H, R)``, one for all layers.
    Parameters:
        0
    Source:
        Chi et al. (2023), "Sandwich", arXiv:2212.10356.
    Differs:
        w is ``width``, not the head's size. The constant -w/2, which the softmax ignores, keeps the
        bias at 0 for distance 0. Not compared with the authors' code.
    """

    shared_by_layers = True  # one module, called once in a pass

    def __init__(self, dims: Dims, *, width: int = 128, scale_factor: float = 1.0) -> None:
        super().__init__(dims, scale_factor)
        if width < 2 or width % 2:
            raise UserError(f"sandwich(width={width}): the width must be even, and at least 2")
        self.width = width

    def bias(self, distances: Tensor) -> Tensor:
        """Compute the dot products of each head at distances ``(n,)``, ``(H, n)`` in float32."""
        half = self.width // 2
        # The angle r / 10000^(2s/w) as whole units of 2^-40 turn: products with r are exact, and
        # their lowest 40 bits are the angle without whole turns, small enough for float32.
        turns = [10000.0 ** -(s / half) / (2 * math.pi) for s in range(1, half + 1)]
        units = make_constant([round(x * 2**40) for x in turns], distances.device, torch.long)
        rest = (distances[:, None] * units).bitwise_and(2**40 - 1)  # [n, w/2]
        angles = rest.float() * (2 * math.pi / 2**40)
        heads = torch.arange(1, self.dims.num_heads + 1, device=distances.device)[:, None]
        return (angles.cos().sum(-1) - half) * self.dims.num_heads / (8 * heads)


@register("fire")
class Fire(Encoding):
    """A small network turns a key's distance, relative to the largest possible one, into a bias.

    Equation:
        e_ij = q_i.k_j / sqrt(c d) + f(log(1 + a (i - j)) / log(1 + a max(i, L))), where f has a
        hidden layer of ``width`` ReLUs and an output for each head, a (the paper's c) and L are
        trained (``curvature``, and ``length`` = L / ``threshold``), and c is ``scale_factor``.
    Shapes:
        weights ``(width, 1)``, ``(H, width)`` and their biases, a and L in each layer.
    Parameters:
        m * (2 * width + h * width + h + 2)
    Source:
        Li et al. (2024), "FIRE", arXiv:2310.04418, equation 7; starting values as there.
    Differs:
        for causal models only, as in the paper. The absolute values of a and L are taken.
    """

    acts_on = "scores"
    takes_real_ids = True
    causal_reason = "it counts how far back a key lies"  # not empty: refused in encoders

    def __init__(
        self, dims: Dims, *, width: int = 32, threshold: float = 512.0, scale_factor: float = 1.0
    ) -> None:
        super().__init__(dims, scale_factor)
        self.threshold = threshold
        self.hidden_weight = nn.Parameter(torch.empty(width, 1))
        self.hidden_bias = nn.Parameter(torch.empty(width))
        self.output_weight = nn.Parameter(torch.empty(dims.num_heads, width))
        self.output_bias = nn.Parameter(torch.empty(dims.num_heads))
        self.curvature = nn.Parameter(torch.empty(()))  # a
        self.length = nn.Parameter(torch.empty(()))  # L, in units of the threshold

    def reset_parameters(self) -> None:
        """Draw weights and biases as ``nn.Linear`` does, and set a = 0.1 and L = threshold."""
        layers = ((self.hidden_weight, self.hidden_bias), (self.output_weight, self.output_bias))
        for weight, bias in layers:
            bound = weight.size(1) ** -0.5
            nn.init.uniform_(weight, -bound, bound)
            nn.init.uniform_(bias, -bound, bound)
        nn.init.constant_(self.curvature, 0.1)
        nn.init.constant_(self.length, 1.0)

    def terms(self, positions: Positions) -> list[Term]:
        """Compute the network's outputs by pair, ``(B or 1, H, T, S)``, in float32 at least."""
        dtype = torch.promote_types(self.curvature.dtype, torch.float32)
        keys = positions.compact_ids().to(dtype)  # [B or 1, S]: one row if it serves all sentences
        queries = positions.queries(keys)[:, :, None]  # [B or 1, T, 1]
        # i - j. Later keys are hidden, but logarithms of their distances must be finite.
        distances = (queries - keys[:, None, :]).clamp(min=0)  # [B or 1, T, S]
        # With a = 0 or L = 0 the quotient would be 0 / 0; with a little more it has its limit.
        farthest = torch.maximum(queries, (self.length * self.threshold).abs()).clamp(min=LEAST)
        curvature = self.curvature.abs().to(dtype).clamp(min=LEAST)
        relative = torch.log1p(curvature * distances) / torch.log1p(curvature * farthest)
        hidden = torch.relu(relative[..., None] * self.hidden_weight[:, 0] + self.hidden_bias)
        with no_autocast(hidden.device):  # stays float32; `hidden` is [B or 1, T, S, width]
            bias = hidden @ self.output_weight.to(dtype).T  # matrix products need equal types
        return [NumbersByPair((bias + self.output_bias).permute(0, 3, 1, 2))]
