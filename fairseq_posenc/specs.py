"""Parses specs, in which users name position encodings, and writes their canonical form.

A spec joins names by ``+`` and has options in brackets, as in ``learned+m4m(max_distance=128)``.
``+reset`` is short for ``reset=true`` of the last encoding before it that has this option.

Layers may differ: specs joined by ``,`` belong to successive layers, ``3*`` repeats a layer, and
the list is repeated over the stack. In ``3*rope,none`` every fourth layer has no positions.
Encodings of the input, ``documents`` and random positions apply to the whole stack, in whichever
layer they are written.

All specs with the same meaning have one canonical form:

- options in the order of the constructor, without defaults;
- encodings in the order of the places they act on (input, rotation, scores, ...), then by name;
  what applies to the whole stack comes last, except encodings of the input;
- ``none`` only for a layer without any encoding;
- the shortest list of layers; encodings of the whole stack are written in the first.

Saved models have the full form instead, with every option: a default that changes later then
changes none of them.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain, groupby
from typing import Any, NamedTuple, get_args

from fairseq_posenc import registry
from fairseq_posenc.encodings.base import Encoding, Place
from fairseq_posenc.encodings.rope_scaling import Scaling
from fairseq_posenc.errors import UserError, shortened, suggest
from fairseq_posenc.option_values import format_value, parse_value

# A name with options; it may have letters and signs that no name has, which are then reported.
_ITEM = re.compile(r"\s*([\w:-]+)\s*(?:\(([^()]*)\))?\s*")
_REPEATED = re.compile(r"\s*(\d{1,6})\s*\*(.*)", re.DOTALL)  # as 3*rope
_COMMA = re.compile(r",(?![^(]*\))")  # outside brackets
_PLUS = re.compile(r"\+(?![^(]*\))")  # outside brackets
# Of a spec; enough for the full form of 100 different layers.
_MAX_CHARACTERS = 20_000
_MAX_LAYERS = 1000
_PLACES_FOR_SEVERAL = ("scores", "softmax", "mask")  # on which several encodings may act


class Item(NamedTuple):
    """One encoding of a spec with the options that were set.

    >>> str(Item("m4m", (("max_distance", 128),)))
    'm4m(max_distance=128)'
    """

    name: str
    options: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def canonical(cls, name: str, values: dict[str, object]) -> "Item":
        """Make the canonical item of an encoding: without options that equal the default."""
        known = registry.options(name)  # the constructor's keyword-only parameters, in order
        changed = [key for key in known if key in values and values[key] != known[key].default]
        return cls(name, tuple((key, values[key]) for key in changed))

    @property
    def encoding(self) -> type[Encoding]:
        """The class of the encoding."""
        return registry.get(self.name)

    @property
    def all_options(self) -> dict[str, Any]:
        """The options by name; unset ones have their defaults."""
        known = registry.options(self.name)  # parameters of the constructor, by name
        return {key: option.default for key, option in known.items()} | dict(self.options)

    def fill_defaults(self) -> "Item":
        """Add the unset options, with their defaults, also in a scaling."""
        values = self.all_options
        for key, value in values.items():
            if isinstance(value, Scaling):
                values[key] = value.write(with_defaults=True)
        return self._replace(options=tuple(values.items()))

    def __str__(self) -> str:
        values = ",".join(f"{key}={format_value(value)}" for key, value in self.options)
        return f"{self.name}({values})" if values else self.name


Items = tuple[Item, ...]  # in canonical order


class Spec(NamedTuple):
    """A parsed spec; ``str()`` gives its canonical form.

    >>> parse("rope,none")
    Spec(whole_stack=(), layers=((Item(name='rope', options=()),), ()))

    Attributes:
        whole_stack: encodings that hold for the whole stack.
        layers: the other encodings of successive layers, repeated over the stack.
    """

    whole_stack: Items
    layers: tuple[Items, ...]

    @property
    def items(self) -> Items:
        """All different encodings; ``none`` if there are no others."""
        return tuple(dict.fromkeys([*self.whole_stack, *chain(*self.layers)])) or (Item("none"),)

    @property
    def names(self) -> set[str]:
        """The names of all encodings."""
        return {item.name for item in self.items}

    @property
    def input_items(self) -> Items:
        """The encodings of the input."""
        return tuple(item for item in self.whole_stack if item.encoding.acts_on == "input")

    @property
    def layer_kinds(self) -> tuple[Items, ...]:
        """The different layers: two for ``3*rope,none``."""
        return tuple(dict.fromkeys(self.layers))

    @property
    def shared_modules(self) -> dict[str, Item]:
        """The encodings with one module for all layers, by the module's name in the stack."""
        others = (item for item in self.items if item not in self.input_items)
        return name_modules(item for item in others if item.encoding.shared_by_layers)

    @property
    def rotates_source(self) -> bool:
        """Whether an encoding also rotates queries and keys of encoder-decoder attention."""
        return any(dict(item.options).get("cross_attention") for item in self.items)

    @property
    def is_causal_only(self) -> bool:
        """Whether an encoding is for causal models alone (``causal_reason`` says why)."""
        # With `window(prefill=true)`, generated tokens have no window: only causal models generate.
        generates = any(dict(x.options).get("prefill") for x in self.items)
        return generates or any(item.encoding.causal_reason for item in self.items)

    def layer_modules(self, index: int) -> dict[str, Item]:
        """Select the encodings with a module in layer ``index``, from 0, by the module's name."""
        layer = self.layers[index % len(self.layers)]
        return name_modules(item for item in layer if not item.encoding.shared_by_layers)

    def layer_kind(self, index: int) -> int:
        """Look up the kind of layer ``index``, an index in :attr:`layer_kinds`."""
        return self.layer_kinds.index(self.layers[index % len(self.layers)])

    def list_rotated(self, layers: int) -> list[bool]:
        """List for each layer of a stack of ``layers`` whether it has a rotation."""
        kinds = [self.layer_kinds[self.layer_kind(index)] for index in range(layers)]
        return [any(item.encoding.acts_on == "rotation" for item in kind) for kind in kinds]

    def select_layers(self, layers: Sequence[int]) -> "Spec":
        """Make the spec of a stack that consists of some layers of this one, by their indices."""
        if not layers:
            raise UserError(f"{self}: no layer is selected, and a stack needs one")
        selected = [self.layers[index % len(self.layers)] for index in layers]
        return self._replace(layers=_find_shortest_period(selected))

    def check_length(self, layers: int) -> None:
        """Refuse a list of layers that is longer than a stack of ``layers``."""
        if len(self.layers) > layers:
            raise UserError(
                f"position encoding {shortened(str(self))!r} is a list of {len(self.layers)} "
                f"layers, but the stack has {layers}: shorten it to the part that repeats"
            )

    def full(self) -> str:
        """Write the spec with all options, also where they have their default.

        >>> parse("window+alibi").full()
        'alibi(mode=symmetric,scale_factor=1,axes=1)+window(size=512,first=none,prefill=false)'
        """
        whole = tuple(item.fill_defaults() for item in self.whole_stack)
        layers = tuple(tuple(item.fill_defaults() for item in layer) for layer in self.layers)
        return str(Spec(whole, layers))

    def __str__(self) -> str:
        repeated: list[str] = []
        inputs = len(self.input_items)
        for layer, same in groupby(self.layers):
            items = layer
            if not repeated:  # the first layer also names the whole stack's
                items = self.whole_stack[:inputs] + layer + self.whole_stack[inputs:]
            text = "+".join(map(str, items)) or "none"
            count = len(list(same))
            repeated.append(f"{count}*{text}" if count > 1 else text)
        return ",".join(repeated)


def parse(text: str) -> Spec:
    """Parse a spec such as ``learned+m4m(max_distance=128)``.

    >>> str(parse("m4m(max_distance=128)+learned"))  # one form for all ways to write it
    'learned+m4m(max_distance=128)'
    >>> str(parse("rope,rope,rope,none"))
    '3*rope,none'

    Raises:
        UserError: the syntax, a name, an option or a value is wrong, or the encodings cannot be
            combined in a model of any size.
    """
    layers = [_parse_layer(items, text) for items in split_spec(text)]
    items = sorted(set(chain(*layers)), key=_sort_key)
    whole = [x for x in items if x.encoding.acts_on == "input" or x.encoding.whole_stack]
    in_layers = [tuple(sorted(set(layer) - set(whole), key=_sort_key)) for layer in layers]
    for layer in in_layers:  # in which the encodings of the whole stack act as well
        _refuse_conflicts([*whole, *layer])
    return Spec(tuple(whole), _find_shortest_period(in_layers))


def split_spec(text: str) -> list[list[str]]:
    """Split the text of a spec into layers, and these into the texts of their encodings.

    Raises:
        UserError: the text is too long, or names too many layers.
    """
    if len(text) > _MAX_CHARACTERS:
        fault = f"longer than {_MAX_CHARACTERS:,} characters"
        raise UserError(f"position encoding {shortened(text)!r}: {fault}")
    layers: list[list[str]] = []
    for part in _COMMA.split(text):
        count, layer = 1, part
        if repeated := _REPEATED.fullmatch(part):
            count, layer = int(repeated[1]), repeated[2]
        if not 1 <= count <= _MAX_LAYERS - len(layers):
            fault = f"name from 1 to {_MAX_LAYERS:,} layers"
            raise UserError(f"position encoding {shortened(text)!r}: {fault}")
        layers += [_PLUS.split(layer)] * count
    return layers


def _parse_layer(layer: list[str], text: str) -> list[Item]:
    """Parse the encodings of one layer of the spec ``text``, without ``none``."""
    encodings: list[tuple[str, dict[str, object]]] = []  # names, and options that were set
    for written in layer:
        match = _ITEM.fullmatch(written)
        if match is None:
            expected = (
                "expected names joined by '+', with options as in m4m(max_distance=128), and "
                "different layers joined by ',', as in 3*rope,none"
            )
            if written.count("(") != written.count(")"):
                expected = f"the brackets of {shortened(written.strip())!r} do not match"
            raise UserError(f"cannot read position encoding {shortened(text)!r}: {expected}")
        name, in_brackets = match.groups()
        if name == "reset":
            if in_brackets:
                raise UserError(f"reset has no option {shortened(in_brackets)!r}: write +reset")
            _apply_reset(encodings, text)
        else:
            encodings.append((name, _parse_options(name, in_brackets or "")))
    items = [Item.canonical(name, values) for name, values in encodings]
    _refuse_conflicts(items)  # before `parse` merges equal ones
    return [item for item in items if item.name != "none"]


def _sort_key(item: Item) -> tuple[int, str]:
    """Make the key of the canonical order: the place that an encoding acts on, then its name."""
    places = get_args(Place)  # "input", "rotation", ..., in the canonical order
    return places.index(item.encoding.acts_on), item.name


def name_modules(items: Iterable[Item]) -> dict[str, Item]:
    """Name items' modules by their encodings; with several sets of options rope, rope_2, ..."""
    named: dict[str, Item] = {}
    for item in items:
        same = sum(other.name == item.name for other in named.values())
        named[f"{item.name}_{same + 1}" if same else item.name] = item
    return named


def _find_shortest_period(layers: Sequence[Items]) -> tuple[Items, ...]:
    """Find the shortest list that gives these layers when it is repeated."""
    beginnings = (tuple(layers[:period]) for period in range(1, len(layers) + 1))
    return next(x for x in beginnings if x * (len(layers) // len(x)) == tuple(layers))


def _apply_reset(encodings: list[tuple[str, dict[str, object]]], text: str) -> None:
    """Set the option ``reset`` of the last encoding that has it, in the options of its name."""
    for name, values in reversed(encodings):
        if "reset" in registry.options(name):
            if values.get("reset") is False:
                fault = f"{name}(reset=false) and +reset contradict each other"
                raise UserError(f"{shortened(text)!r}: {fault}")
            values["reset"] = True
            return
    known = ", ".join(name for name in registry.names() if "reset" in registry.options(name))
    raise UserError(f"{shortened(text)!r}: reset must follow an encoding that has it: {known}")


def split_options(name: str, text: str, listed: str = "") -> dict[str, str]:
    """Split the options in the brackets of an encoding; a message may list the known ones."""
    values: dict[str, str] = {}
    for part in text.strip().removesuffix(",").split(",") if text.strip() else ():
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise UserError(f"{name}({shortened(text)}): write NAME=VALUE{listed}")
        if key in values:
            raise UserError(f"{name}({shortened(text)}): {key} is set twice")
        values[key] = value
    return values


def _parse_options(name: str, text: str) -> dict[str, object]:
    """Parse the options in the brackets of an encoding."""
    known = registry.options(name)  # parameters of the constructor, by name
    parsed: dict[str, object] = {}
    listed = f"its options: {', '.join(known) or 'none'}"
    for key, value in split_options(name, text, f"; {listed}").items():
        if key not in known:
            written, near = shortened(f"{key}={value}"), suggest(key, known)
            raise UserError(f"{name} has no option {written!r}: {near}{listed}")
        try:
            parsed[key] = parse_value(value, known[key].annotation)
        except UserError as error:
            raise UserError(f"{name}({key}={shortened(value)}): {error}") from None
    return parsed


def _refuse_conflicts(items: Sequence[Item]) -> None:
    """Refuse an encoding that is named twice, and two for a place on which only one can act."""
    names_by_place: dict[str, list[str]] = defaultdict(list)
    written = shortened("+".join(map(str, items)))
    for item in items:
        place = item.encoding.acts_on
        others = names_by_place[place]
        if item.name in others:
            raise UserError(f"{written}: {item.name} is named twice")
        if others and place not in _PLACES_FOR_SEVERAL:
            fault = f"{others[0]} and {item.name} both act on the {place}"
            raise UserError(f"{written}: {fault}; choose one of them")
        others.append(item.name)
