"""Relative vectors that meet the query (Shaw et al.)."""

from __future__ import annotations

from typing import Any

from fairseq_posenc.encodings.base import Terms
from fairseq_posenc.encodings.distance_table import DistanceEncoding, as_bert, of_bert
from fairseq_posenc.encodings.native import Meant, Native
from fairseq_posenc.positions import Positions, Span
from fairseq_posenc.registry import register


@register("shaw")
class Shaw(DistanceEncoding):
    """A trained vector for each signed distance is compared with the query.

    Equation:
        e_ij = (q_i.k_j + q_i.a_r) / sqrt(c d), where r = clip(j - i, -K, K).
    Shapes:
        table ``(G, 2K+1, D)`` in each layer.
    Parameters:
        m * (2K+1) * d
    Source:
        Shaw et al. (2018), "Self-Attention with Relative Position Representations",
        arXiv:1803.02155, equation 4; ``relative_key`` in Hugging Face's BERT.
    Differs:
        the vectors that Shaw et al. also add to the values are in ``shaw_values``.
    """

    def terms(self, span: Span, positions: Positions) -> Terms:
        """Return the rows as query table, ``(G, R, D)``."""
        return Terms(
            query_table=self.table.rows(span),
            scale_factor=self.scale_factor,
            first=self.table.first(positions),
        )


def to_hf(encoding: Shaw) -> list[Native]:
    """Return RoBERTa with ``relative_key``."""
    return as_bert(encoding, "relative_key")


def from_hf(model: str, config: dict[str, Any]) -> Meant | None:
    """Return the positions of such a RoBERTa."""
    return of_bert(model, config, "relative_key")
