"""Dot products of positions (TUPE): in the form of the M4M paper, and in that of TUPE's authors.

B batch, T queries, S keys, H = h heads, G tables (H, or by default 1 for all heads), D = d head
size, C model size; n positions, m layers; K is ``max_distance``. ``Parameters`` counts with G = 1.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_posenc.encodings.base import Dims, Encoding, register
from fairseq_posenc.encodings.relative_positions import DistanceEncoding
from fairseq_posenc.encodings.t5 import Buckets
from fairseq_posenc.encodings.term import NumbersByDistance, NumbersByPair, Reset, Term
from fairseq_posenc.positions import Positions
from fairseq_posenc.precision import at_least_fp32, no_autocast


@register("tupe")
class Tupe(DistanceEncoding):
    """Adds a number per distance, and the dot product of trained absolute positions.

    Equation:
        e_ij = (q_i.k_j + (p_i U_Q).(p_j U_K)) / sqrt(c d) + b_r,
        where r = clip(j - i, -K, K) and c = 2.
    Shapes:
        positions ``(n, D)``, U_Q and U_K ``(D, D)``, table ``(G, 2K+1)`` in each layer.
    Parameters:
        m * (n * d + 2 * d^2 + 2K+1)
    Source:
        Ke et al. (2021), "TUPE", arXiv:2006.15595, in the form of Huang et al. (2021),
        arXiv:2109.12788, equation 14; ``tupe(reset=true)`` is equation 15, which they trained.
    Differs:
        Huang et al. count one projection; ``tie_projections`` (U_K = U_Q) gives their number. With
        ``reset`` the first token's numbers replace the whole positional part. ``tupe_shared`` is
        the form of Ke et al.
    """

    has_position_table = True  # a row for each position: longer models need new rows

    def __init__(
        self, dims: Dims, *, scale_factor: float = 2.0, tie_projections: bool = False, **others: Any
    ) -> None:
        super().__init__(dims, scale_factor=scale_factor, **others)  # options of `DistanceEncoding`
        self.positions = nn.Parameter(torch.empty(dims.max_positions, dims.head_dim))  # vectors p
        d = dims.head_dim
        self.query_projection = nn.Parameter(torch.empty(d, d))  # if tied, of keys as well
        # None, not a second name of the same tensor, which safetensors would refuse to save.
        self.key_projection = None if tie_projections else nn.Parameter(torch.empty(d, d))

    def terms(self, positions: Positions) -> list[Term]:
        """Add products of positions, scaled here, ``(B or 1, 1, T, S)``, and those by distance."""
        positions.check_limit(self.dims.max_positions, self.name)
        ids = positions.compact_ids(self.dims.max_positions)  # [1, S] if one row serves all
        vectors = at_least_fp32(self.positions[ids])  # [B or 1, S, D]
        if self.has_reset:  # numbers of the table by distance replace the first token's products
            vectors = vectors.masked_fill(positions.is_first()[..., None], 0.0)
        of_keys = self.query_projection if self.key_projection is None else self.key_projection
        with no_autocast(vectors.device):
            queries = positions.queries(vectors) @ at_least_fp32(self.query_projection)
            keys = vectors @ at_least_fp32(of_keys) * self.dims.scale(self.scale_factor)
            pairs = queries @ keys.transpose(1, 2)  # [B or 1, T, S]
        return [NumbersByPair(pairs.unsqueeze(1)), *super().terms(positions)]


@register("tupe_shared")
class TupeShared(Encoding):
    """Dot products between trained absolute positions, and biases by T5's buckets, for all layers.

    Equation:
        e_ij = (q_i.k_j + (W_Q p_i).(W_K p_j)) / sqrt(c d) + b_r, where r is T5's bucket of j - i,
        c = 2, p_i is the output of a layer norm, and all but b is split over the heads.
    Shapes:
        positions ``(n+1, C)``, W_Q and W_K ``(H * D, C)`` with biases, layer norm ``(C,)``, buckets
        ``(H, buckets+1)``, one for all layers.
    Parameters:
        (n+1) * C + 2 * C + 2 * (C^2 + C) + (buckets+1) * h
    Source:
        Ke et al. (2021), arXiv:2006.15595; ``tupe_shared(reset=true)`` is their TUPE-R.
    Differs:
        written from the published description, not compared with the authors' code. Row 0 of the
        positions serves the reset only; the first token is at row 1.
    """

    acts_on = "scores"
    shared_by_layers = True  # one module, called once in a pass
    has_position_table = True  # a row for each position: longer models need new rows
    ones, zeros = ("norm_weight",), ("norm_bias", "query_bias", "key_bias")  # start at 1, at 0

    def __init__(
        self,
        dims: Dims,
        *,
        num_buckets: int = 32,
        max_distance: int = 128,
        scale_factor: float = 2.0,
        reset: bool = False,
    ) -> None:
        super().__init__(dims, scale_factor)
        self.bucket_rule = Buckets.of_t5(self.name, num_buckets, max_distance, both_sides=True)
        self.num_buckets = num_buckets
        self.reset = reset
        width = dims.embed_dim
        self.positions = nn.Parameter(torch.empty(dims.max_positions + 1, width))  # p, before norm
        self.norm_weight = nn.Parameter(torch.empty(width))
        self.norm_bias = nn.Parameter(torch.empty(width))
        self.query_weight = nn.Parameter(torch.empty(dims.all_heads_dim, width))
        self.query_bias = nn.Parameter(torch.empty(dims.all_heads_dim))
        self.key_weight = nn.Parameter(torch.empty(dims.all_heads_dim, width))
        self.key_bias = nn.Parameter(torch.empty(dims.all_heads_dim))
        self.buckets = nn.Parameter(torch.empty(dims.num_heads, num_buckets + 1))

    def terms(self, positions: Positions) -> list[Term]:
        """Add scaled products of positions, ``(B or 1, H, T, S)``, and numbers by distance."""
        positions.check_limit(self.dims.max_positions, self.name)
        # Counted ids are below S, the number of tokens. A caller's may not be: all rows are used.
        limit = positions.src_len if positions.counted else self.dims.max_positions
        with no_autocast(self.positions.device):
            queries, keys = self._project(1 + limit)
        rows = positions.compact_ids(self.dims.max_positions) + 1  # row 0 is of a reset
        at_queries = queries[:, positions.queries(rows)].transpose(0, 1)  # [B or 1, H, T, D]
        at_keys = keys[:, rows].transpose(0, 1) * self.dims.scale(self.scale_factor)  # with S
        index, runs = self.bucket_rule.select(positions)  # R buckets, and the distances of each
        bias = self.buckets[:, index]
        reset: list[Term] = []
        if self.reset:  # pairs with the first token have two numbers instead of products
            first = positions.is_first()
            reset = [Reset(first)]  # which reads the last two columns of the bias, below
            at_queries = at_queries.masked_fill(positions.queries(first)[:, None, :, None], 0.0)
            at_keys = at_keys.masked_fill(first[:, None, :, None], 0.0)
            bias = torch.cat([bias, self._reset_bias(queries, keys)], dim=1)  # [H, R + 2]
        with no_autocast(self.positions.device):
            pairs = at_queries @ at_keys.transpose(-1, -2)  # [B or 1, H, T, S]
        return [NumbersByPair(pairs), NumbersByDistance(bias, runs), *reset]

    def _reset_bias(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Compute the numbers of pairs with the first token, ``(H, 2)``: as query, then as key.

        These are theta_1 and theta_2 of Ke et al.: the product of a row of positions (0 for the
        query, 1 for the key) as projected to queries and to keys, plus a bucket of its own.
        """
        products = (queries[:, :2] * keys[:, :2]).sum(-1) * self.dims.scale(self.scale_factor)
        unused_bucket = self.num_buckets // 2  # T5's first one of later keys: no distance has it
        return products + self.buckets[:, [unused_bucket, self.num_buckets]]

    def _project(self, rows: int) -> tuple[Tensor, Tensor]:
        """Project the first rows to queries and keys, ``(H, rows, D)``, in float32 at least."""
        norm = at_least_fp32(self.norm_weight), at_least_fp32(self.norm_bias)
        normed = F.layer_norm(at_least_fp32(self.positions[:rows]), (self.dims.embed_dim,), *norm)
        queries = F.linear(normed, at_least_fp32(self.query_weight), at_least_fp32(self.query_bias))
        keys = F.linear(normed, at_least_fp32(self.key_weight), at_least_fp32(self.key_bias))
        heads = (self.dims.num_heads, self.dims.head_dim)
        queries, keys = queries.unflatten(-1, heads), keys.unflatten(-1, heads)  # [rows, H, D]
        return queries.transpose(0, 1), keys.transpose(0, 1)
