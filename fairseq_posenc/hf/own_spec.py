"""Expands the word ``own`` in a spec, which stands for the positions that a model already has."""

from collections.abc import Mapping, Sequence

from fairseq_posenc.errors import UserError, shortened
from fairseq_posenc.registry import options as options_of
from fairseq_posenc.specs import Item, Items, Spec, parse, split_spec

OWN = "own"


def names_own(spec: str) -> bool:
    """Check whether a spec has the word ``own``."""
    return any(_is_own(item) for layer in split_spec(spec) for item in layer)


def expand_own(spec: str, own: Spec, num_layers: int) -> Spec:
    """Replace ``own`` in a spec by the positions that the model has.

    In layer i, ``own`` stands for the positions of the model's layer i. Options in brackets change
    those of the model, wherever an encoding has an option of that name.

    >>> print(expand_own("2*own,own(base=500)+alibi", parse("rope,none,rope(layout=half)"), 3))
    rope,none,rope(base=500,layout=half)+alibi

    Args:
        spec: as a user writes it.
        own: the positions of the model.
        num_layers: number of layers of the model.

    Raises:
        UserError: the spec cannot be read, or the model's positions lack an option.
    """
    layers = split_spec(spec)
    own_layers = [layer.items for layer in own.split_layers()]
    # A spec of more layers than the model has keeps them all, so that the model refuses it.
    count = max(num_layers, len(layers))
    own_by_layer = [own_layers[index % len(own_layers)] for index in range(count)]
    for index, layer in enumerate(layers):
        # The user's layer stands for every `len(layers)`-th layer of the model, from `index` on.
        replaced = [item for items in own_by_layer[index :: len(layers)] for item in items]
        known = {name for item in replaced for name in options_of(item.name)}
        for item in filter(_is_own, layer):
            if unknown := _read_options(item).keys() - known:
                raise UserError(
                    f"{shortened(item)}: the model's positions there have no option "
                    f"{shortened(min(unknown))!r}; they are {shortened(str(own))}"
                )
    expanded = []
    for index, own_items in enumerate(own_by_layer):
        layer = layers[index % len(layers)]
        expanded.append("+".join(part for item in layer for part in _expand_item(item, own_items)))
    return parse(join_layers(expanded))


def join_layers(layers: Sequence[str]) -> str:
    """Join the specs of all layers to the shortest list whose repetition begins with them."""
    # A list with this period equals itself when it is shifted by the period.
    period = next(n for n in range(1, len(layers) + 1) if layers[n:] == layers[:-n])
    return ",".join(layers[:period])


def _is_own(item: str) -> bool:
    return item.partition("(")[0].strip() == OWN


def _read_options(item: str) -> dict[str, str]:
    """Read the options of an item of a spec, ``NAME(OPTION=VALUE,...)``, by their names.

    Raises:
        UserError: the bracket is not closed.
    """
    _, bracket, inner = item.rstrip().partition("(")
    if bracket and not inner.endswith(")"):
        raise UserError(f"{shortened(item)}: the bracket is not closed")
    pairs = [part.partition("=") for part in inner.removesuffix(")").split(",") if part.strip()]
    return {name.strip(): value.strip() for name, _, value in pairs}


def _expand_item(item: str, own_items: Items) -> list[str]:
    """List an item of a user's spec; for ``own``, list the model's items, with changed options."""
    if not _is_own(item):
        return [item]
    return [_change_options(own_item, _read_options(item)) for own_item in own_items]


def _change_options(item: Item, changes: Mapping[str, str]) -> str:
    """Write an item of the model's spec, with the changes of options that its encoding has."""
    known = options_of(item.name)
    scaled = dict(item.options).get("scaling")
    if scaled is not None and changes.get("scaling", "none") != "none":
        raise UserError(
            f"own(scaling={shortened(changes['scaling'])}): the model's rotations are scaled "
            f"already, by {shortened(str(scaled))}; to replace that, write the encoding itself: "
            f"{shortened(str(item))} with another scaling"
        )
    options = dict(item.options) | {k: v for k, v in changes.items() if k in known}
    return str(item._replace(options=tuple(options.items())))
