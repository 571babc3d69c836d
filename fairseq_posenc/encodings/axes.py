"""Positions on several axes, such as row and column: which axis rotates a pair of coordinates.

With the sections ``2/1``, the pairs 0 and 1 turn by the row, and pair 2 by the column.
"""

from __future__ import annotations

from fairseq_posenc.errors import UserError


class Sections(tuple[int, ...]):
    """The number of pairs of coordinates that each axis rotates, written ``16/24/24``."""

    @classmethod
    def parse(cls, text: str) -> Sections:
        """Parse numbers separated by slashes.

        Raises:
            UserError: a part is not a whole number of at least 1.
        """
        parts = text.split("/")
        if not all(part.isdecimal() and int(part) > 0 for part in parts):
            raise UserError("write the pairs of each axis as 16/24/24")
        return cls(map(int, parts))

    def __str__(self) -> str:
        return "/".join(map(str, self))


def assign_axes(
    name: str, pairs: int, axes: int, sections: Sections | None, interleaved: bool
) -> list[int]:
    """Assign an axis, a number from 0, to each pair of coordinates.

    Args:
        name: the name of the encoding, for error messages.
        pairs: the number of pairs.
        axes: the number of axes.
        sections: the number of pairs of each axis; None for equal parts.
        interleaved: the axes take turns until their sections are full, and the first axis gets the
            remaining pairs, as in Qwen3-VL: 4/2/2 gives 0 1 2 0 1 2 0 0. Otherwise the pairs of an
            axis stand together.

    Raises:
        UserError: the pairs cannot be divided in this way.
    """
    if sections is None:
        if pairs % axes:
            raise UserError(
                f"{name}(axes={axes}): {pairs} pairs of coordinates cannot be divided among "
                f"{axes} axes; give the pairs of each axis, such as sections=16/24/24"
            )
        sections = Sections([pairs // axes] * axes)
    if len(sections) != axes or sum(sections) != pairs:
        raise UserError(
            f"{name}(axes={axes},sections={sections}): there must be {axes} sections with the sum "
            f"{pairs}, the pairs of coordinates that are rotated"
        )
    if not interleaved:
        return [axis for axis, count in enumerate(sections) for _ in range(count)]
    assigned = [0] * pairs  # the first axis, unless another takes its turn
    for axis in range(1, axes):
        turns = range(axis, pairs, axes)[: sections[axis]]
        if len(turns) < sections[axis]:
            raise UserError(
                f"{name}(sections={sections},pairs=interleaved): only the first section may be "
                "more than an equal part"
            )
        for pair in turns:
            assigned[pair] = axis
    return assigned
