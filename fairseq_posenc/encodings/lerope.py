"""Rotary positions with trained frequencies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from fairseq_posenc.encodings.base import Dims, register
from fairseq_posenc.encodings.precision import at_least_fp32
from fairseq_posenc.encodings.rope import Rope
from fairseq_posenc.encodings.rope_scaling import Scaling


@register("lerope")
class LeRope(Rope):
    """As ``rope``, but the frequency of each pair of coordinates is trained.

    Equation:
        e_ij = (R_i q_i).(R_j k_j) / sqrt(d), where R_i turns pair t of coordinates by the angle
        i * w_t * exp(a_t), w_t is the frequency of ``rope``, base^(-2t/d), and a_t is trained.
    Shapes:
        a ``(D/2,)``, once for all layers; it starts at 0, which is ``rope``.
    Parameters:
        d/2
    Source:
        Mistral Large 4 (2026), "LeRoPE", ``alpha`` of ``MistralLarge4TextRotaryEmbedding`` in
        Hugging Face's transformers, where w has ``scaling=yarn:2048:length=512:attention_factor=1``
        and every fourth layer no positions.
    Differs:
        nothing. a stays in float32 in models of 16 bits, as theirs does.
    """

    def __init__(
        self,
        dims: Dims,
        *,
        base: float = 10000.0,
        fraction: float = 1.0,
        layout: Literal["interleaved", "half"] = "interleaved",
        scaling: Scaling = Scaling(),  # noqa: B008  (frozen)
    ) -> None:
        super().__init__(dims, base=base, fraction=fraction, layout=layout, scaling=scaling)
        self.alpha = nn.Parameter(torch.empty(self.rotated // 2, dtype=torch.float32))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LeRope:
        """Keep ``alpha`` in float32 in models of 16 bits, as Mistral does.

        Rounded to bfloat16, angles at a distance of 1,000 tokens would be wrong by about 1.
        """

        def keep_float32(x: Tensor) -> Tensor:
            moved = fn(x)
            return moved if moved.element_size() >= 4 else x.to(moved.device, torch.float32)

        super()._apply(keep_float32, recurse)
        return self

    def reset_parameters(self) -> None:
        """Start as ``rope``."""
        nn.init.zeros_(self.alpha)

    def angles_per_position(self) -> Tensor:
        """Multiply the frequencies by the trained factors, ``(rotated / 2,)``."""
        return super().angles_per_position() * at_least_fp32(self.alpha).exp()
