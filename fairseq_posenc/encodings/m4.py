"""Relative vectors that meet both the query and the key, added (Huang's method 4)."""

from __future__ import annotations

from typing import ClassVar, Literal, Optional

from torch import nn

from fairseq_posenc.encodings.base import INIT_STD, Dims, DistanceTable, Encoding, Terms
from fairseq_posenc.positions import Positions, Span
from fairseq_posenc.registry import register


@register("m4")
class M4(Encoding):
    """A trained vector for each signed distance is compared with the query and with the key.

    Equation:
        e_ij = (q_i.k_j + q_i.a_r + k_j.a_r) / sqrt(c d), r = clip(j - i, -K, K).
    Shapes:
        table ``(G, 2K+1, D)`` in each layer.
    Parameters:
        m * (2K+1) * d
    Source:
        Huang et al. (2020), "Improve Transformer Models with Better Relative Position Embeddings",
        arXiv:2009.13658, method 4.
    Differs:
        K is ``max_distance``, by default n - 1, so that no distance is clipped. ``per_head`` gives
        every head its own table, ``scale_factor`` is c, ``reset`` gives the first token two
        vectors of its own in place of its distances (equation 19 of arXiv:2109.12788).
    """

    acts_on: ClassVar[Literal["scores"]] = "scores"
    product: ClassVar[bool] = False

    def __init__(
        self,
        dims: Dims,
        *,
        max_distance: Optional[int] = None,
        per_head: bool = False,
        scale_factor: float = 1.0,
        reset: bool = False,
    ) -> None:
        super().__init__(dims)
        self.scale_factor = scale_factor
        groups = dims.num_heads if per_head else 1
        reach = dims.max_positions - 1 if max_distance is None else max_distance
        self.table = DistanceTable(reach, dims.head_dim, groups, reset)

    def reset_parameters(self) -> None:
        """Draw the vectors: normal, standard deviation 0.02."""
        nn.init.normal_(self.table.weight, std=INIT_STD)

    def terms(self, span: Span, positions: Positions) -> Terms:
        """Return the same rows as query and key table, ``(G, R, D)``."""
        rows = self.table.rows(span)
        return Terms(
            query_table=rows,
            key_table=rows,
            product=self.product,
            scale_factor=self.scale_factor,
            first=self.table.first(positions),
        )

    @classmethod
    def parameter_count(cls, dims: Dims, layers: int) -> int:
        """Return m * (2n-1) * d."""
        return layers * (2 * dims.max_positions - 1) * dims.head_dim
