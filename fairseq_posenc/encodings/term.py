"""Describes a term of the attention scores: its shape, its place in the equation, and its cost."""

from typing import Literal, NamedTuple

from torch import Tensor


class Cost(NamedTuple):
    """Formulas of a layer's cost on the reference backend: n tokens, h heads of width d, C = h d.

    A table has u distinct rows: 2n-1, or fewer where distances share rows (see
    :class:`~fairseq_posenc.encodings.runs.Runs`). States have the width w. ``{g}`` is h if each
    head has a table, and nothing otherwise. Empty means no cost.

    Attributes:
        operations: multiplications and additions for each sentence.
        numbers: numbers in memory at the same time for each sentence.
        common_operations: operations done once for all sentences.
        common_numbers: numbers in memory once for all sentences.
    """

    operations: str = ""
    numbers: str = ""
    common_operations: str = ""
    common_numbers: str = ""


class Term(NamedTuple):
    """The description of a field of :class:`~fairseq_posenc.encodings.terms.Terms`.

    Attributes:
        axes: the shape, a letter for each dimension (see :mod:`~fairseq_posenc.encodings.base`); B
            may be 1 as well.
        enters: the place in the equation. ``content``: it multiplies the content term; ``table``:
            its dot products are added or multiplied; ``bias``: it is added after scaling;
            ``states``: its products with states are added after scaling; ``values``: it is added to
            the values.
        cost: the cost in a layer.
    """

    axes: str
    enters: Literal["content", "table", "bias", "states", "values"]
    cost: Cost

    @property
    def rows(self) -> int | None:
        """The dimension with a row for each distance; None if the term has no such rows."""
        return self.axes.index("R") if "R" in self.axes else None

    @property
    def has_vectors(self) -> bool:
        """Whether a row is a vector, multiplied with queries or keys, and not a number."""
        return self.axes[-1] in "DCW"

    def per_head(self, tensor: Tensor) -> bool:
        """Check whether a tensor of this term differs from head to head."""
        return "G" in self.axes and tensor.size(self.axes.index("G")) > 1
