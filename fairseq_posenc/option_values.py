"""Parses and formats the values of options in specs: numbers, flags, choices, lists of numbers."""

import math
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from fairseq_posenc.errors import UserError, shortened, suggest

# Larger tables would not fit into memory; larger factors, or smaller divisors, overflow scores.
_LARGEST_INT = 1_000_000
_FLOAT_RANGE = (1e-6, 1e12)


class Signed(float):
    """The type of an option that may be any finite number; a ``float`` is at least 1e-6."""


def parse_value(text: str, option_type: Any, largest_int: int = _LARGEST_INT) -> Any:
    """Convert the text of an option to its type.

    >>> parse_value("16/24/24", tuple[int, ...])
    (16, 24, 24)

    Args:
        text: the value as it is written.
        option_type: ``bool``, ``int``, ``float``, :class:`Signed`, ``Literal[...]``, a tuple of
            numbers, a class with a method ``parse``, or one of these or None.
        largest_int: the largest whole number that is accepted.

    Raises:
        UserError: the text is not a value of the type; callers put the option's name before.
    """
    types = get_args(option_type)
    if NoneType in types:  # Optional[X], X | None or None | X: parse an X
        if text == "none":
            return None
        return parse_value(text, next(x for x in types if x is not NoneType), largest_int)
    if get_origin(option_type) is Literal:
        if text not in types:
            raise UserError(f"{suggest(text, types)}choose one of {', '.join(types)}")
        return text
    if get_origin(option_type) is tuple:  # tuple[X, ...]
        return tuple(parse_value(part, types[0], largest_int) for part in text.split("/"))
    if option_type is bool:
        if text.lower() not in ("true", "false"):
            raise UserError("write true or false")
        return text.lower() == "true"
    if option_type not in (int, float, Signed):
        return option_type.parse(text)  # a `Scaling`; a wrong text is a UserError
    expected = {int: "a whole number", Signed: "a finite number"}.get(option_type, "a number")
    try:
        number: float = option_type(text)
    except ValueError:
        raise UserError(f"expected {expected}") from None
    if option_type is Signed:
        if not math.isfinite(number):
            raise UserError(f"expected {expected}")
        return number
    least, most = (1, largest_int) if option_type is int else _FLOAT_RANGE
    if not least <= number <= most:  # `not`, so that NaN is refused, too
        raise UserError(f"must be from {least:g} to {most:,.0f}, not {shortened(text)}")
    return number


def format_value(value: Any) -> str:
    """Format the value of an option as it is written: ``true`` for True, ``2`` for 2.0.

    >>> format_value((1.5, 2.0))
    '1.5/2'
    """
    if isinstance(value, (list, tuple)):
        return "/".join(map(format_value, value))
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)
