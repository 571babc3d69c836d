"""Sinusoids of the distance: their products with the query (Transformer-XL).

The letters of shapes are those of :mod:`~fairseq_posenc.encodings.base`.
"""

import torch
from torch import nn

from fairseq_posenc.encodings.base import Dims, Encoding, register
from fairseq_posenc.encodings.runs import Runs
from fairseq_posenc.encodings.sinusoidal import Sinusoidal
from fairseq_posenc.encodings.term import Cost
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.errors import UserError
from fairseq_posenc.positions import Positions, Span


@register("transformer_xl")
class TransformerXL(Encoding):
    """The dot product of the query with a projected sinusoid of the distance is added.

    Equation:
        e_ij = ((q_i + u).k_j + (q_i + v).(W s_(i-j))) / sqrt(c d), where s is the sinusoid
        of width C of a distance; u and v are trained, c is ``scale_factor``.
    Shapes:
        W ``(C, C)``, u and v ``(H, D)`` in each layer.
    Parameters:
        m * (C^2 + 2 * C)
    Source:
        Dai et al. (2019), "Transformer-XL", arXiv:1901.02860, section 3.3.
    Differs:
        no segment memory; u and v are in each layer, as in the paper's equation, not shared.
    """

    acts_on = "scores"
    # W s of each distance, computed in each layer
    cost = Cost(common_operations="2 (2n-1) C^2", common_numbers="(2n-1) C")

    def __init__(self, dims: Dims, *, scale_factor: float = 1.0) -> None:
        super().__init__(dims)
        self.scale_factor = scale_factor
        self.projection = nn.Parameter(torch.empty(dims.heads_dim, dims.embed_dim))
        self.u = nn.Parameter(torch.empty(dims.num_heads, dims.head_dim))
        self.v = nn.Parameter(torch.empty(dims.num_heads, dims.head_dim))
        self.sinusoids = Sinusoidal(dims)

    def terms(self, span: Span, positions: Positions) -> Terms:
        """Compute W s as query table, u as the key table's only row, and v.(W s) as bias."""
        has_ids = span.ids is not None
        if has_ids:  # the span is unbounded: make a row for each distance that these ids can have
            reach = _find_largest_id(positions)
            span = span._replace(low=-reach, high=reach)
        sinusoids = self.sinusoids.vectors(-span.distances()).type_as(self.projection)  # [R, C]
        rows = (sinusoids @ self.projection.T).unflatten(-1, self.u.shape)  # [R, H, D]
        rows = rows.transpose(0, 1)  # [H, R, D]
        bias = (rows * self.v[:, None]).sum(-1) * self.dims.scale(self.scale_factor)  # [H, R]
        terms = Terms(query_table=rows, bias=bias, scale_factor=self.scale_factor)
        if has_ids:
            terms = terms.with_runs(Runs(range(span.low + 1, span.high + 1), span))
        # A single run of all distances, whose row is u.
        runs = {**terms.runs, "key_table": Runs((), span)}
        return terms._replace(key_table=self.u[:, None], runs=runs)


def _find_largest_id(positions: Positions) -> int:
    """Find the largest of a caller's ids; if it is not known yet, this waits for a GPU.

    Raises:
        UserError: torch is compiling, so ids have no values.
    """
    if torch.compiler.is_compiling():
        raise UserError(
            "transformer_xl: it has a row for each distance between position_ids, which a "
            "graph does not know: leave them out, or compile another encoding"
        )
    return positions.longest - 1 if positions.longest else int(positions.ids.max())
