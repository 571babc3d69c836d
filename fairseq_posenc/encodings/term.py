"""Describes a term of the attention scores: its shape, where it enters, and what it costs."""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor


class Cost(NamedTuple):
    """Formulas of a layer's cost on the reference backend: n tokens, h heads of width d, C = h d.

    A table has u distinct rows: 2n-1, or fewer where distances share rows (see
    :class:`~fairseq_posenc.encodings.runs.Runs`).

    Attributes:
        operations: multiplications and additions for each sentence.
        numbers: numbers held at once for each sentence.
        common_operations: those done once, for all sentences together.
        common_numbers: those held once, for all sentences together.
    """

    operations: str = ""
    numbers: str = ""
    common_operations: str = ""
    common_numbers: str = ""


class Term(NamedTuple):
    """The description of a field of Terms, for code that handles terms of any name.

    Attributes:
        axes: its shape in letters of the legend; B may be 1 as well.
        enters: where in the equation: ``content``, it multiplies the content term; ``table``, it
            is a dot product of its own, added or multiplied; ``bias``, it is added after scaling;
            ``states``, so are its products with states; ``values``, it is added to what is attended
            to.
        cost: of what a layer does with it; ``{g}`` is h where each head has its own, else nothing.
    """

    axes: str
    enters: Literal["content", "table", "bias", "states", "values"]
    cost: Cost

    @property
    def rows(self) -> int | None:
        """The dimension with a row for each distance; None if it is not a function of distance."""
        return self.axes.index("R") if "R" in self.axes else None

    @property
    def has_vectors(self) -> bool:
        """Whether a row is a vector that a product with queries or keys takes, else a number."""
        return self.axes[-1] in "DCW"

    def per_head(self, tensor: Tensor) -> bool:
        """Check whether a tensor of this term differs from head to head."""
        return "G" in self.axes and tensor.size(self.axes.index("G")) > 1
