"""Names, specs and construction of position encodings.

A spec is what a user writes: names joined by ``+``, options in brackets, as in
``learned+m4m(max_distance=128)``. ``+reset`` is short for ``reset=true`` of the encoding before it.

Specs of one meaning have one canonical form, which checkpoints carry: options in the order of the
constructor, without those that have their default; encodings of the input first, then rotations,
then those of the scores, by name; ``none`` only where nothing else is.
"""

from __future__ import annotations

import importlib
import inspect
import math
import pkgutil
import re
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from fairseq_posenc import encodings
from fairseq_posenc.encodings.base import ENCODINGS, Dims, Encoding, Encodings
from fairseq_posenc.errors import UserError, shortened

# DecBERT's named settings: directions of the first layers, each with learned positions or without.
DECBERT = {"decbert_same": "lr,lr", "decbert_diff": "lr,rl"}
_ITEM = re.compile(r"\s*([a-z0-9_]+)\s*(?:\(([^()]*)\))?\s*")
_LONGEST = 1000  # characters of a spec; all encodings together have fewer
# What numbers can be: beyond, tables fit into no memory, and scores into no number.
_WHOLE = (1, 1_000_000)
_FACTOR = (1e-6, 1e12)


class Item(NamedTuple):
    """One encoding of a spec with the options that were set."""

    name: str
    options: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def canonical(cls, name: str, values: dict[str, Any]) -> Item:
        """Make the canonical item of an encoding with some options."""
        known = options(name).items()
        changed = (k for k, option in known if values.get(k, option.default) != option.default)
        return cls(name, tuple((key, values[key]) for key in changed))

    def __str__(self) -> str:
        values = ",".join(f"{key}={_format_value(value)}" for key, value in self.options)
        return f"{self.name}({values})" if values else self.name


class Spec(NamedTuple):
    """A parsed spec; ``str()`` gives its canonical form."""

    items: tuple[Item, ...]

    def select(self, place: str) -> Spec:
        """Select the encodings whose modules live at a place.

        ``input``: beside the token embeddings; ``stack``: one for all layers; ``layer``: one each.
        """
        return Spec(tuple(item for item in self.items if module_place(get(item.name)) == place))

    def __str__(self) -> str:
        return "+".join(map(str, self.items))


def module_place(cls: type[Encoding]) -> str:
    """Name the place of an encoding's modules; see :meth:`Spec.select`."""
    if cls.acts_on == "input":
        return "input"
    return "stack" if cls.shared else "layer"


@cache
def _scan() -> None:
    for module in pkgutil.iter_modules(encodings.__path__, encodings.__name__ + "."):
        importlib.import_module(module.name)


def names() -> list[str]:
    """List the names of all encodings, sorted."""
    _scan()
    return sorted(ENCODINGS)


def names_for(*, encoder: bool = False, decoder: bool = False) -> list[str]:
    """List the encodings that work in an encoder, a decoder (all of them do), or both."""
    return [name for name in names() if not (encoder and get(name).causal_only)]


def get(name: str) -> type[Encoding]:
    """Look up the class of an encoding.

    Raises:
        UserError: the name is unknown; the message lists the known ones.
    """
    _scan()
    if name not in ENCODINGS:
        raise UserError(
            f"unknown position encoding {shortened(name)!r}; known: {', '.join(names())}"
        )
    return ENCODINGS[name]


def options(name: str) -> dict[str, inspect.Parameter]:
    """List the options of an encoding: its constructor's keyword-only arguments, resolved."""
    constructor = get(name).__init__
    hints = get_type_hints(constructor)
    return {
        key: parameter.replace(annotation=hints[key])
        for key, parameter in inspect.signature(constructor).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }


def parse(text: str) -> Spec:
    """Parse a spec such as ``learned+m4m(max_distance=128)``.

    Raises:
        UserError: a syntax error, an unknown name or option, a value of the wrong type, or a
            composition that has no meaning whatever the sizes.
    """
    if len(text) > _LONGEST:
        raise UserError(
            f"position encoding {shortened(text)!r}: longer than {_LONGEST:,} characters"
        )
    items: list[tuple[str, dict[str, Any]]] = []
    for part in re.split(r"\+(?![^(]*\))", text):
        match = _ITEM.fullmatch(part)
        if match is None:
            raise UserError(
                f"cannot read position encoding {shortened(text)!r}: expected names joined by '+', "
                "each with options as in m4m(max_distance=128)"
            )
        name, written = match.groups()
        if name == "reset":
            _apply_reset(items, text)
        else:
            items.append((name, _parse_options(name, written or "")))
    spec = Spec(tuple(Item.canonical(name, values) for name, values in items))
    _refuse_double(spec)
    return _sort_items(spec)


def build(spec: Spec, dims: Dims) -> Encodings:
    """Build new encodings, their parameters drawn.

    Raises:
        UserError: sizes that an encoding cannot work with, or terms that cannot be combined.
    """
    for what, size in (
        ("width", dims.embed_dim),
        ("number of attention heads", dims.num_heads),
        ("number of positions", dims.max_positions),
    ):
        if size < 1:
            raise UserError(f"the {what} must be at least 1, not {size}")
    if dims.embed_dim % dims.num_heads:
        raise UserError(
            f"width {dims.embed_dim} cannot be divided among {dims.num_heads} attention heads"
        )
    built = Encodings(
        {item.name: get(item.name)(dims, **dict(item.options)) for item in spec.items}
    )
    for encoding in built.each():
        encoding.reset_parameters()
    return built


def _sort_items(spec: Spec) -> Spec:
    """Sort the items by place and name; ``none`` stays only where it is alone."""
    items = [item for item in spec.items if item.name != "none"] or list(spec.items)
    places = get_args(get_type_hints(Encoding)["acts_on"])[0]
    order = get_args(places)
    return Spec(tuple(sorted(items, key=lambda x: (order.index(get(x.name).acts_on), x.name))))


def _apply_reset(items: list[tuple[str, dict[str, Any]]], text: str) -> None:
    """Set the reset of the last encoding that has it."""
    for name, values in reversed(items):
        if "reset" in options(name):
            if values.get("reset") is False:
                raise UserError(
                    f"{shortened(text)!r}: {name}(reset=false) and +reset contradict each other"
                )
            values["reset"] = True
            return
    able = [name for name in names() if "reset" in options(name)]
    raise UserError(
        f"{shortened(text)!r}: reset must follow an encoding that has it: {', '.join(able)}"
    )


def _parse_options(name: str, text: str) -> dict[str, Any]:
    known = options(name)
    parsed: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if key not in known or not equals:
            listed = ", ".join(known) or "none"
            raise UserError(f"{name} has no option {shortened(part)!r}; its options: {listed}")
        if key in parsed:
            raise UserError(f"{name}({shortened(text)}): {key} is set twice")
        parsed[key] = _convert(name, key, value, known[key].annotation)
    return parsed


def _convert(name: str, key: str, value: str, kind: Any) -> Any:
    if get_origin(kind) in (Union, UnionType):  # Optional[X] or X | None
        kind = next(choice for choice in get_args(kind) if choice is not NoneType)
    if get_origin(kind) is Literal:
        if value in get_args(kind):
            return value
        raise UserError(
            f"{name}({key}={shortened(value)}): choose one of {', '.join(get_args(kind))}"
        )
    if kind is bool:
        if value.lower() in ("true", "false"):
            return value.lower() == "true"
        raise UserError(f"{name}({key}={shortened(value)}): write true or false")
    return _number(name, key, value, kind) if kind in (int, float) else kind(value)


def _number(name: str, key: str, text: str, kind: type) -> float:
    """Parse a number: all of them are sizes, distances or factors, so above 0."""
    written = f"{name}({key}={shortened(text)})"
    try:
        number: float = kind(text)
    except ValueError:
        wanted = "a whole number" if kind is int else "a number"
        raise UserError(f"{written}: expected {wanted}") from None
    if not 0 < number < math.inf:  # so that NaN fails
        allowed = "at least 1" if kind is int else "a finite number above 0"
        raise UserError(f"{written}: {key} must be {allowed}, not {shortened(text)}")
    least, most = _WHOLE if kind is int else _FACTOR
    if not least <= number <= most:
        raise UserError(f"{written}: {key} must be from {least:g} to {most:,.0f}")
    return number


def _refuse_double(spec: Spec) -> None:
    seen: dict[str, str] = {}
    for item in spec.items:
        place = get(item.name).acts_on
        if item.name in seen.values():
            raise UserError(f"{shortened(str(spec))}: {item.name} is named twice")
        if place != "scores" and place in seen:
            raise UserError(
                f"{shortened(str(spec))}: {seen[place]} and {item.name} both act on the {place}; "
                "choose one of them"
            )
        seen[place if place != "scores" else item.name] = item.name


def _format_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)
