"""Relative positions: trained rows for distances, in every layer (Shaw, Raffel, Huang).

n positions, H heads, G tables (H, or by default 1), R rows in a call, D = d head size; m layers.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fairseq_posenc.encodings.base import Dims, Encoding, register
from fairseq_posenc.encodings.runs import Runs
from fairseq_posenc.encodings.term import (
    NumbersByDistance,
    Reset,
    RowsByDistance,
    RowsOf,
    Term,
    sum_over_axes,
)
from fairseq_posenc.errors import UserError
from fairseq_posenc.positions import Positions


class DistanceEncoding(Encoding):
    """Base class of encodings with a trained row for each signed distance r = j - i, in each layer.

    Distances are clipped: the table has the row ``clip(r, -K, K) + K``. With K = 2, row 0 is for
    the distances up to -2, row 1 for -1, row 2 for 0 (the query's token), row 3 for 1, and row 4
    for the distances from 2 on.

    Args:
        tables: the number of tables, one for each axis of the positions.
        max_distance: K, the largest distance; larger ones are clipped. By default n - 1, which
            clips no distance.
        per_head: give every head its own table.
        scale_factor: c of the scale 1 / sqrt(c * D).
        reset: give pairs with the first token two rows, whatever their distance: one for its query,
            one for its key (Huang et al. 2021, equation 19).

    Shapes:
        table.weight ``(G, 2K + 1, D)`` or ``(G, 2K + 1)``; table.reset ``(G, 2, D)`` or ``(G, 2)``.
    """

    acts_on = "scores"  # specs sort encodings by it, also those with rows for values
    length_options = ("max_distance",)  # a model may change it: `extend` keeps rows' distances
    is_signed: ClassVar[bool] = True  # False: the table has K + 1 rows, one for both r and -r
    rows_of: ClassVar[tuple[RowsOf, ...]] = ()  # what its vectors act on; empty: it has numbers
    multiplies: ClassVar[bool] = False  # whether numbers, or products with rows, multiply q_i.k_j

    def __init__(
        self,
        dims: Dims,
        tables: int = 1,
        *,
        max_distance: int | None = None,
        per_head: bool = False,
        scale_factor: float = 1.0,
        reset: bool = False,
    ) -> None:
        has_scale = "scale_factor" not in self.without_options  # rows for values have none
        super().__init__(dims, scale_factor if has_scale else None)
        self.max_distance = dims.max_positions - 1 if max_distance is None else max_distance
        if self.max_distance < 1:
            raise UserError(
                f"max_distance must be at least 1, not {self.max_distance}: a model of one "
                "position has no distances; raise max_positions, or set max_distance"
            )
        self.has_reset = reset
        groups = tables * (dims.num_heads if per_head else 1)
        rows = (2 if self.is_signed else 1) * self.max_distance + 1
        row_shape = (dims.head_dim,) if self.rows_of else ()
        self.table = nn.ParameterDict()  # `reset_parameters` sets the values
        self.table["weight"] = torch.empty(groups, rows, *row_shape)
        if reset:  # not in `weight`, which would be longer than that of a checkpoint without it
            self.table["reset"] = torch.empty(groups, 2, *row_shape)

    def terms(self, positions: Positions) -> list[Term]:
        """List the terms with the rows of a call's distances, and with the two of a reset."""
        K, rows = self.max_distance, self.table["weight"]
        if not self.is_signed:  # rows of 0, 1, 2 ... K become those of -K ... 2 1 0 1 2 ... K
            rows = torch.cat([rows[:, 1:].flip(1), rows], 1)
        starts = range(1 - K, K + 1)  # the distance at which each row but the first begins
        # A slice of the rows for this call, and which distances share one (None: each has its own).
        kept, runs = Runs.select(starts, positions)
        rows = rows[:, kept]  # [G, R, ...]
        if not self.has_reset:
            return self.list_terms(rows, runs)
        rows = torch.cat([rows, self.table["reset"]], 1)  # [G, R + 2, ...]
        return [*self.list_terms(rows, runs), Reset(positions.is_first())]

    def list_terms(self, rows: Tensor, runs: Runs | None) -> list[Term]:
        """List the terms with the rows of a call, ``(G, R, D)`` or ``(G, R)``, and their runs."""
        if not self.rows_of:
            return [NumbersByDistance(rows, runs, multiplies=self.multiplies)]
        return [RowsByDistance(rows, runs, of=x, multiplies=self.multiplies) for x in self.rows_of]

    def extend(self, name: str, weight: Tensor) -> Tensor:
        """Extend a loaded table to the distances of this one; return any other unchanged.

        Distances beyond the ends of a table are clipped, so the rows at its ends are repeated.
        """
        table = self.table["weight"]
        missing = table.size(1) - weight.size(1)  # rows; if signed, half of them at either end
        is_table = name == "table.weight" and weight.shape[2:] == table.shape[2:]
        if not is_table or missing <= 0 or (self.is_signed and missing % 2):
            return weight
        before = missing // 2 if self.is_signed else 0  # rows to add before the first one
        index = torch.arange(table.size(1), device=weight.device) - before
        return weight[:, index.clamp(0, weight.size(1) - 1)]  # [G, 2K+1 or K+1, ...]


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
        Shaw et al. (2018), arXiv:1803.02155, equation 4; ``relative_key`` in Hugging Face's BERT.
    Differs:
        the vectors that Shaw et al. also add to the values are in ``shaw_values``.
    """

    rows_of = ("query",)


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
        Shaw et al. (2018), arXiv:1803.02155, equation 3; the paper's model is ``shaw+shaw_values``.
    Differs:
        nothing with the default options.
    """

    without_options = ("scale_factor",)  # specs refuse it: values are not scaled
    rows_of = ("value",)


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

    def __init__(self, dims: Dims, *, axes: int = 1, **others: Any) -> None:
        super().__init__(dims, axes, **others)  # the options of `DistanceEncoding`
        self.axes = axes
        if axes > 1 and self.has_reset:
            raise UserError("raffel(reset=true) has one axis: leave out axes or reset")

    def list_terms(self, rows: Tensor, runs: Runs | None) -> list[Term]:
        """Scale the numbers, ``(axes * G, R)``, which are added to scaled scores."""
        tables = rows.unflatten(0, (self.axes, -1)) * self.dims.scale(self.scale_factor)
        return [sum_over_axes(tables, runs)]  # of a pair, the numbers of its distances on each axis


@register("m1")
class M1(DistanceEncoding):
    """The dot product is multiplied by a trained number for each unsigned distance.

    Equation:
        e_ij = (q_i.k_j) * a_s / sqrt(c d), where s = min(abs(j - i), K) and a_s is a number.
    Shapes:
        table ``(G, K+1)`` in each layer.
    Parameters:
        m * (K+1)
    Source:
        Huang et al. (2020), arXiv:2009.13658, method 1.
    Differs:
        the numbers start at 1, which is plain attention; the paper gives no initial values.
    """

    is_signed = False
    multiplies = True
    ones = ("table.weight",)  # parameters that start at 1, which is plain attention
    without_options = ("reset",)  # specs refuse it: the paper defines none for this method


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
        Huang et al. (2020), arXiv:2009.13658, method 2.
    Differs:
        the numbers start at 1, which is plain attention; the paper gives no initial values.
    """

    multiplies = True
    ones = ("table.weight", "table.reset")


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
        Huang et al. (2020), arXiv:2009.13658, method 3.
    Differs:
        the vectors start at 1, which is plain attention; the paper gives no initial values. No
        matrix product computes this form, so it costs D passes over the scores.
    """

    ones = ("table.weight", "table.reset")
    rows_of = ("channel",)


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
        Huang et al. (2020), arXiv:2009.13658, method 4; Hugging Face's ``relative_key_query``.
    Differs:
        nothing with the default options.
    """

    rows_of = ("query", "key")


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
        Huang et al. (2021), "M4M", arXiv:2109.12788, equation 20.
    Differs:
        nothing.
    """

    multiplies = True
