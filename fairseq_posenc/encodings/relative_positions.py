"""Relative positions: trained rows for distances, in every layer (Shaw, Raffel, Huang).

The letters of shapes are those of :mod:`~fairseq_posenc.encodings.base`.
"""

from typing import Any, Optional

import torch
from torch import Tensor, nn

from fairseq_posenc.encodings.base import Dims, Encoding, register
from fairseq_posenc.encodings.distance_table import DistanceEncoding, DistanceTable
from fairseq_posenc.encodings.runs import Runs
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.errors import UserError
from fairseq_posenc.positions import Positions, Span


@register("shaw")
class Shaw(DistanceEncoding):
    """The dot product of the query with a trained vector for the signed distance is added.

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

    term_fields = ("query_table",)


@register("shaw_values")
class ShawValues(DistanceEncoding):
    """A trained vector for each signed distance is added to the value of the key.

    Equation:
        z_i = sum_j w_ij (v_j + a_r), where w_ij are the attention weights and
        r = clip(j - i, -K, K).
    Shapes:
        table ``(G, 2K+1, D)`` in each layer.
    Parameters:
        m * (2K+1) * d
    Source:
        Shaw et al. (2018), "Self-Attention with Relative Position Representations",
        arXiv:1803.02155, equation 3. The paper's model is ``shaw+shaw_values``.
    Differs:
        nothing with the default options.
    """

    without_options = ("scale_factor",)  # values are not scaled

    def terms(self, span: Span, positions: Positions) -> Terms:
        """Select the rows as value table, ``(G, R, D)``."""
        rows, runs = self.table.select(span)
        first = self.table.mark_first(positions)
        return Terms(value_table=rows, first=first).with_runs(runs)


@register("raffel")
class Raffel(DistanceEncoding):
    """A trained number for each signed distance is added to the dot product.

    Equation:
        e_ij = (q_i.k_j + a_r) / sqrt(c d), where r = clip(j - i, -K, K) and a_r is a number.
    Shapes:
        table ``(G, 2K+1)`` in each layer.
    Parameters:
        m * (2K+1)
    Source:
        Raffel et al. (2020), arXiv:1910.10683, in the form of Huang et al. (2021),
        arXiv:2109.12788, equation 10.
    Differs:
        no buckets and a table in each layer; ``t5`` is Raffel's own form.
    """

    has_vectors = False

    def __init__(self, dims: Dims, *, axes: int = 1, **others: Any) -> None:
        super().__init__(dims, **others)
        self.axes = axes
        if axes > 1:
            if self.table.reset is not None:
                raise UserError("raffel(reset=true) has one axis: leave out axes or reset")
            groups = axes * self.table.weight.size(0)
            self.table = DistanceTable(self.table.max_distance, groups=groups)

    def terms(self, span: Span, positions: Positions) -> Terms:
        """Compute the scaled rows as bias, ``(G, R)``, or by pair."""
        scale = self.dims.scale(self.scale_factor)
        rows, runs = self.table.select(span)
        tables = rows.unflatten(0, (self.axes, -1))  # [axes, G, R]
        if span.has_axes:
            return Terms.by_axis(span, tables * scale, runs.find, self.scale_factor)
        return Terms(
            bias=tables.sum(0) * scale,  # a distance is the same on all axes
            scale_factor=self.scale_factor,
            first=self.table.mark_first(positions),
        ).with_runs(runs)


@register("m1")
class M1(Encoding):
    """The dot product is multiplied by a trained number for each unsigned distance.

    Equation:
        e_ij = (q_i.k_j) * a_s / sqrt(c d), where s = min(abs(j - i), K) and a_s is a number.
    Shapes:
        table ``(G, K+1)`` in each layer.
    Parameters:
        m * (K+1)
    Source:
        Huang et al. (2020), "Improve Transformer Models with Better Relative Position Embeddings",
        arXiv:2009.13658, method 1.
    Differs:
        the numbers start at 1, which is plain attention; the paper gives no initial values.
    """

    acts_on = "scores"

    def __init__(
        self,
        dims: Dims,
        *,
        max_distance: Optional[int] = None,
        per_head: bool = False,
        scale_factor: float = 1.0,
    ) -> None:
        super().__init__(dims)
        self.max_distance = dims.max_positions - 1 if max_distance is None else max_distance
        self.scale_factor = scale_factor
        groups = dims.num_heads if per_head else 1
        self.table = nn.Parameter(torch.empty(groups, self.max_distance + 1))

    def reset_parameters(self) -> None:
        """Start from plain attention."""
        nn.init.ones_(self.table)

    def extend(self, name: str, weight: Tensor) -> Tensor:
        """Extend the loaded table, the only parameter, by repeating the number at its end."""
        missing = max(self.table.size(1) - weight.size(1), 0)
        return torch.cat([weight, weight[:, -1:].expand(-1, missing)], dim=1)

    def terms(self, span: Span, positions: Positions) -> Terms:
        """Select the rows of unsigned distances as gain, ``(G, R)``."""
        # The runs of signed distances, of which two share a row of the table.
        _, runs = Runs.select(range(1 - self.max_distance, self.max_distance + 1), span)
        distances = runs.representatives().abs().clamp(max=self.max_distance)  # [R]
        gain = self.table[:, distances]
        return Terms(gain=gain, scale_factor=self.scale_factor).with_runs(runs)


@register("m2")
class M2(DistanceEncoding):
    """The dot product is multiplied by a trained number for each signed distance.

    Equation:
        e_ij = (q_i.k_j) * a_r / sqrt(c d), where r = clip(j - i, -K, K) and a_r is a number.
    Shapes:
        table ``(G, 2K+1)`` in each layer.
    Parameters:
        m * (2K+1)
    Source:
        Huang et al. (2020), "Improve Transformer Models with Better Relative Position Embeddings",
        arXiv:2009.13658, method 2.
    Differs:
        the numbers start at 1, which is plain attention; the paper gives no initial values.
    """

    has_vectors = False
    initial_value = 1.0
    term_fields = ("gain",)


@register("m3")
class M3(DistanceEncoding):
    """Query, key and a trained vector for the signed distance are multiplied channel by channel.

    Equation:
        e_ij = sum_t q_it k_jt a_rt / sqrt(c d), where r = clip(j - i, -K, K).
    Shapes:
        table ``(G, 2K+1, D)`` in each layer.
    Parameters:
        m * (2K+1) * d
    Source:
        Huang et al. (2020), "Improve Transformer Models with Better Relative Position Embeddings",
        arXiv:2009.13658, method 3.
    Differs:
        the vectors start at 1, which is plain attention; the paper gives no initial values. No
        matrix product computes this form, so it costs D passes over the scores.
    """

    initial_value = 1.0
    term_fields = ("channel_gain",)


@register("m4")
class M4(DistanceEncoding):
    """The dot products of query and key with a trained vector for the signed distance are added.

    Equation:
        e_ij = (q_i.k_j + q_i.a_r + k_j.a_r) / sqrt(c d), where r = clip(j - i, -K, K).
    Shapes:
        table ``(G, 2K+1, D)`` in each layer.
    Parameters:
        m * (2K+1) * d
    Source:
        Huang et al. (2020), "Improve Transformer Models with Better Relative Position Embeddings",
        arXiv:2009.13658, method 4; ``relative_key_query`` in Hugging Face's BERT.
    Differs:
        nothing with the default options.
    """

    term_fields = ("query_table", "key_table")


@register("m4m")
class M4M(M4):
    """As ``m4``, but the three dot products are multiplied.

    Equation:
        e_ij = (q_i.k_j) * (q_i.a_r) * (k_j.a_r) / sqrt(c d), where r = clip(j - i, -K, K).
    Shapes:
        table ``(G, 2K+1, D)`` in each layer.
    Parameters:
        m * (2K+1) * d
    Source:
        Huang et al. (2021), "Multiplicative Position-aware Transformer Models for Language
        Understanding", arXiv:2109.12788, equation 20.
    Differs:
        the options are those of ``m4``.
    """

    product = True
