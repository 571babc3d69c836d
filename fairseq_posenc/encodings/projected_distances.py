"""Rows by distance that are projected: DeBERTa in two forms, and Transformer-XL.

H heads, G tables (H, or 1 for all, as in ``Parameters``), R rows in a call, D = d head size, m
layers, C model size; K is the option ``max_distance``.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_posenc.encodings.absolute import Sinusoidal
from fairseq_posenc.encodings.base import Dims, Encoding, register
from fairseq_posenc.encodings.relative_positions import DistanceEncoding
from fairseq_posenc.encodings.runs import Runs
from fairseq_posenc.encodings.t5 import Buckets, find_starts
from fairseq_posenc.encodings.term import NumbersByDistance, RowsByDistance, Term
from fairseq_posenc.errors import UserError
from fairseq_posenc.positions import Positions


@register("deberta")
class Deberta(DistanceEncoding):
    """A trained vector for each signed distance is projected once for queries, once for keys.

    Equation:
        e_ij = (q_i.k_j + q_i.(a_r W_R) + k_j.(a_r W_T)) / sqrt(c d),
        where r = clip(j - i, -K, K) and c = 3.
    Shapes:
        table ``(G, 2K+1, D)``, W_R and W_T ``(D, D)`` in each layer.
    Parameters:
        m * ((2K+1) * d + 2 * d^2)
    Source:
        He et al. (2021), "DeBERTa", arXiv:2006.03654, in the form of Huang et al. (2021),
        arXiv:2109.12788, equation 13. ``deberta_v2`` equals Hugging Face's DebertaV2.
    Differs:
        Huang et al. count one projection; ``tie_projections`` (W_T = W_R) gives their number. With
        ``reset``, pairs with the first token have two rows of their own in the table.
    """

    rows_of = ("query", "key")  # of `DistanceEncoding`: rows are vectors, for both products

    def __init__(
        self, dims: Dims, *, scale_factor: float = 3.0, tie_projections: bool = False, **others: Any
    ) -> None:
        super().__init__(dims, scale_factor=scale_factor, **others)  # options of `DistanceEncoding`
        d = dims.head_dim
        self.query_projection = nn.Parameter(torch.empty(d, d))  # if tied, of keys as well
        # None, not a second name of the same tensor, which safetensors would refuse to save.
        self.key_projection = None if tie_projections else nn.Parameter(torch.empty(d, d))

    def list_terms(self, rows: Tensor, runs: Runs | None) -> list[Term]:
        """Project a call's rows, ``(G, R, D)``, for queries and for keys (``terms`` calls it)."""
        of_keys = self.query_projection if self.key_projection is None else self.key_projection
        return [
            RowsByDistance(rows @ self.query_projection, runs, of="query"),
            RowsByDistance(rows @ of_keys, runs, of="key"),
        ]


@register("deberta_v2")
class DebertaV2(Encoding):
    """Trained vectors of distance buckets go through each layer's own projections.

    Equation:
        e_ij = (q_i.k_j + q_i.(W_K p_b) + k_j.(W_Q p_b)) / sqrt(c d), where c = 3, b is the bucket
        of i - j (one distance each up to buckets // 2, then logarithmic up to the trained length),
        p_b the normalized row of the table, W_Q and W_K the layer's projections, without its norms.
    Shapes:
        table ``(2 * buckets, C)`` and its layer norm ``(C,)``, one for all layers.
    Parameters:
        2 * buckets * C + 2 * C
    Source:
        He et al. (2021), "DeBERTaV3", arXiv:2111.09543; Hugging Face's DebertaV2 with
        ``pos_att_type = c2p|p2c``, ``share_att_key`` and ``norm_rel_ebd = layer_norm``.
    Differs:
        nothing with the default sizes. With some others, Hugging Face's float32 puts one or two
        distances one bucket lower.
    """

    acts_on = "scores"
    shared_by_layers = True  # one module; `terms` is called once in a pass
    ones, zeros = ("norm_weight",), ("norm_bias",)  # parameters that start at 1, at 0

    def __init__(self, dims: Dims, *, buckets: int = 256, scale_factor: float = 3.0) -> None:
        super().__init__(dims, scale_factor)
        if buckets < 2:
            raise UserError(f"deberta_v2(buckets={buckets}): buckets must be at least 2")
        self.buckets = buckets
        self.compute_constants()
        self.table = nn.Parameter(torch.empty(2 * buckets, dims.embed_dim))  # not drawn yet
        self.norm_weight = nn.Parameter(torch.empty(dims.embed_dim))
        self.norm_bias = nn.Parameter(torch.empty(dims.embed_dim))

    def terms(self, positions: Positions) -> list[Term]:
        """Compute the normalized rows for each layer to project, ``(1, R, C)``."""
        index, runs = self.bucket_rule.select(positions)  # rows `(R,)`, and the distances of each
        shape = (self.dims.embed_dim,)
        normed = F.layer_norm(self.table, shape, self.norm_weight, self.norm_bias, eps=1e-7)
        return [RowsByDistance(normed[None, index], runs, of="layer")]

    def compute_constants(self) -> None:
        """Find the buckets; also called when lengths change.

        Rounded as in DebertaV2: the logarithm runs from ``buckets // 2`` to the trained length - 1,
        which falls in the last bucket but one.
        """
        exact = self.buckets // 2
        # At least `exact` + 1, as `find_bucket` divides by the logarithm of longest / exact.
        longest = max(self.dims.trained_length, exact + 2) - 1

        def find_bucket(distance: int) -> int:
            if distance <= exact:
                return distance
            share = math.log(distance / exact) / math.log(longest / exact)
            return exact + math.ceil(share * (exact - 1))

        # Of j - i, both signs. With 2 or 3 as `buckets`, all distances but 0 are in bucket 1.
        starts = find_starts(find_bucket, last=self.buckets)  # up to the bucket of that number
        # One bucket more than starts: of i - j from farthest to -farthest. Bucket b has the row
        # buckets + b; as in DebertaV2's table, the last row, 2 * buckets - 1, serves two buckets.
        farthest = len(starts) // 2
        rows = (self.buckets + bucket for bucket in range(farthest, -farthest - 1, -1))
        self.bucket_rule = Buckets(starts, tuple(min(x, 2 * self.buckets - 1) for x in rows))


@register("transformer_xl")
class TransformerXL(Encoding):
    """The dot product of the query with a projected sinusoid of the distance is added.

    Equation:
        e_ij = ((q_i + u).k_j + (q_i + v).(W s_(i-j))) / sqrt(c d), where s is the sinusoid
        of width C, sines and cosines in turn; u and v are trained, c is ``scale_factor``.
    Shapes:
        W ``(H * D, C)``, u and v ``(H, D)`` in each layer.
    Parameters:
        m * (C^2 + 2 * C)
    Source:
        Dai et al. (2019), "Transformer-XL", arXiv:1901.02860, section 3.3.
    Differs:
        no segment memory; u and v are in each layer, as in the paper's equation, not shared.
    """

    acts_on = "scores"

    def __init__(self, dims: Dims, *, scale_factor: float = 1.0) -> None:
        super().__init__(dims, scale_factor)
        self.projection = nn.Parameter(torch.empty(dims.all_heads_dim, dims.embed_dim))
        self.u = nn.Parameter(torch.empty(dims.num_heads, dims.head_dim))
        self.v = nn.Parameter(torch.empty(dims.num_heads, dims.head_dim))
        self.sinusoids = Sinusoidal(dims)

    def terms(self, positions: Positions) -> list[Term]:
        """Compute W s as query table, u as the only row for keys, and v.(W s), scaled, as bias.

        Raises:
            UserError: torch is compiling, and a caller's position ids have no values there.
        """
        low, high = 1 - positions.src_len, positions.tgt_len - 1
        if not positions.consecutive:  # make a row for each distance that these ids can have
            if torch.compiler.is_compiling():
                raise UserError(
                    "transformer_xl: it has a row for each distance between position_ids, which a "
                    "graph does not know: leave them out, or compile another encoding"
                )
            longest = positions.longest  # None if not known yet: then `max` waits for a GPU
            reach = int(positions.ids.max()) if longest is None else longest - 1
            low, high = -reach, reach
        distances = torch.arange(low, high + 1, device=positions.device)
        sinusoids = self.sinusoids.vectors(-distances).type_as(self.projection)  # [R, C]
        projected = sinusoids @ self.projection.T  # [R, H * D]
        rows = projected.unflatten(-1, self.u.shape).transpose(0, 1)  # [H, R, D]
        bias = (rows * self.v[:, None]).sum(-1) * self.dims.scale(self.scale_factor)  # [H, R]
        starts = range(low + 1, high + 1)  # where rows 1, 2, ... begin; row 0 has `low`
        _, runs = Runs.select(starts, positions)  # the slice has all rows: each is in reach
        _, all_distances = Runs.select([], positions)  # no starts: one row for all distances
        return [
            RowsByDistance(rows, runs, of="query"),
            RowsByDistance(self.u[:, None], all_distances, of="key"),
            NumbersByDistance(bias, runs),
        ]
