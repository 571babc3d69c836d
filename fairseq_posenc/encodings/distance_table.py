"""Trained rows for signed distances, and the base class of encodings with rows in each layer.

A distance is j - i for key j and query i, so those of earlier keys are negative. The letters of
shapes are those of :mod:`~fairseq_posenc.encodings.base`.
"""

from typing import Any, ClassVar, Optional

import torch
from torch import Tensor, nn

from fairseq_posenc.encodings.base import Dims, Encoding
from fairseq_posenc.encodings.runs import Runs
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.errors import UserError
from fairseq_posenc.positions import Positions, Span


class DistanceTable(nn.Module):
    """Trained rows by clipped signed distance r: row ``clip(r, -K, K) + K``.

    Args:
        max_distance: K.
        width: the size of a row; None for scalars.
        groups: 1 if the heads share the table, else the number of heads.
        reset: add two rows, for a query and for a key at the first token.

    Shapes:
        weight ``(G, 2K + 1, width)`` or ``(G, 2K + 1)``; reset ``(G, 2, width)`` or ``(G, 2)``.
    """

    def __init__(
        self, max_distance: int, width: int | None = None, groups: int = 1, reset: bool = False
    ) -> None:
        super().__init__()
        if max_distance < 1:
            raise UserError(
                f"max_distance must be at least 1, not {max_distance}: a model of one position has "
                "no distances; raise max_positions, or set max_distance"
            )
        self.max_distance = max_distance
        row_shape = () if width is None else (width,)
        self.weight = nn.Parameter(torch.empty(groups, 2 * max_distance + 1, *row_shape))
        # Not in `weight`, which would be a longer table than that of a checkpoint without a reset.
        self.reset = nn.Parameter(torch.empty(groups, 2, *row_shape)) if reset else None

    def select(self, span: Span) -> tuple[Tensor, Runs]:
        """Select the rows for the distances of ``span``.

        Returns:
            The rows, ``(G, R, width)`` or ``(G, R)``, with the two rows of a reset at the end, and
            the runs of distances that share them.
        """
        limit = self.max_distance
        kept, runs = Runs.select(range(1 - limit, limit + 1), span)  # row 0: up to -limit
        rows = self.weight[:, kept]  # [G, R, ...]
        if self.reset is not None:
            rows = torch.cat([rows, self.reset], dim=1)
        return rows, runs

    def extend(self, weight: Tensor) -> Tensor:
        """Extend a shorter table to the distances of this one; return any other unchanged.

        Distances beyond the ends of a table are clipped, so the rows at its ends are repeated.
        """
        missing = self.weight.size(1) - weight.size(1)  # half of them at either end
        if missing <= 0 or missing % 2 or weight.shape[2:] != self.weight.shape[2:]:
            return weight
        before = weight[:, :1].repeat_interleave(missing // 2, dim=1)
        after = weight[:, -1:].repeat_interleave(missing // 2, dim=1)
        return torch.cat([before, weight, after], dim=1)  # [G, 2K+1, ...]

    def mark_first(self, positions: Positions) -> Tensor | None:
        """Mark the tokens for this table's two reset rows; see :attr:`Terms.first`."""
        return None if self.reset is None else positions.is_first()


class DistanceEncoding(Encoding):
    """Base class of encodings with a trained row for each signed distance, in each layer.

    Args:
        dims: the sizes of the stack.
        max_distance: K, the largest distance; larger ones are clipped. By default n - 1, which
            clips no distance.
        per_head: give every head its own table.
        scale_factor: c of the scale 1 / sqrt(c * D).
        reset: give the first token two rows in place of its distances, one for its query and one
            for its key (Huang et al. 2021, equation 19).
    """

    acts_on = "scores"
    has_vectors: ClassVar[bool] = True  # whether a row has D numbers, not one
    initial_value: ClassVar[Optional[float]] = None  # of all rows; None: drawn at random
    term_fields: ClassVar[tuple[str, ...]] = ()  # the fields of `Terms` that get the rows
    product: ClassVar[bool] = False  # see `Terms`

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
        self.table = DistanceTable(
            dims.max_positions - 1 if max_distance is None else max_distance,
            width=dims.head_dim if self.has_vectors else None,
            groups=dims.num_heads if per_head else 1,
            reset=reset,
        )

    def reset_parameters(self) -> None:
        """Set the rows to the class's initial value; draw them at random if it has none."""
        if self.initial_value is None:
            super().reset_parameters()
        else:
            for parameter in self.table.parameters():
                nn.init.constant_(parameter, self.initial_value)

    def terms(self, span: Span, positions: Positions) -> Terms:
        """Select the rows, ``(G, R, D)`` or ``(G, R)``, for the class's ``term_fields``."""
        rows, runs = self.table.select(span)
        tables: dict[str, Any] = dict.fromkeys(self.term_fields, rows)
        first = self.table.mark_first(positions)
        terms = Terms(**tables, product=self.product, scale_factor=self.scale_factor, first=first)
        return terms.with_runs(runs)

    def extend(self, name: str, weight: Tensor) -> Tensor:
        """Extend a loaded table to the distances of this one, by repeating the rows at its ends."""
        return self.table.extend(weight) if name == "table.weight" else weight


def make_projections(width: int, tied: bool) -> tuple[nn.Parameter, nn.Parameter]:
    """Make two projections ``(width, width)``; if ``tied``, the same parameter twice."""
    projection = nn.Parameter(torch.empty(width, width))
    return projection, projection if tied else nn.Parameter(torch.empty(width, width))
