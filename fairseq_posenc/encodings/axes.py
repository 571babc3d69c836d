"""Positions on several axes, such as row and column: which pairs of coordinates turn by which."""

from __future__ import annotations

from fairseq_posenc.errors import UserError


class Sections(tuple[int, ...]):
    """How many pairs of coordinates turn by each axis, written ``16/24/24``."""

    @classmethod
    def parse(cls, text: str) -> Sections:
        """Parse numbers with slashes between them.

        Raises:
            UserError: they are not whole numbers of at least 1.
        """
        parts = text.split("/")
        if not all(part.isdecimal() and int(part) for part in parts):
            raise UserError("write the pairs of each axis as 16/24/24")
        return cls(map(int, parts))

    def __str__(self) -> str:
        return "/".join(map(str, self))


def assign_axes(
    name: str, pairs: int, axes: int, sections: Sections | None, order: str
) -> list[int]:
    """Assign an axis to each pair of coordinates.

    Args:
        name: of the encoding, for errors.
        pairs: their number.
        axes: the number of axes.
        sections: how many pairs each axis has; None for equal parts.
        order: ``blocks`` and ``alternating``, the pairs of an axis stand together;
            ``interleaved``, they take turns as long as an axis has pairs left, as in Qwen3-VL,
            where the first axis has those that are left over.

    Raises:
        UserError: the pairs cannot be divided so.
    """
    if sections is None:
        if pairs % axes:
            raise UserError(
                f"{name}(axes={axes}): {pairs} pairs of coordinates cannot be divided among "
                f"{axes} axes; give their numbers as sections, such as sections=16/24/24"
            )
        sections = Sections([pairs // axes] * axes)
    if len(sections) != axes or sum(sections) != pairs:
        raise UserError(
            f"{name}(axes={axes},sections={sections}): the sections must be {axes}, and their sum "
            f"{pairs}, the pairs of coordinates that are rotated"
        )
    if order != "interleaved":
        return [axis for axis, count in enumerate(sections) for _ in range(count)]
    assigned = [pair % axes if pair < sections[pair % axes] * axes else 0 for pair in range(pairs)]
    if [assigned.count(axis) for axis in range(axes)] != list(sections):
        raise UserError(
            f"{name}(sections={sections},pairs=interleaved): only the first section may be more "
            "than an equal part"
        )
    return assigned
