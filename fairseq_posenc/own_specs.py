"""Replaces the word ``own`` in a spec by the positions that a model has.

In ``3*own+window(size=512),none`` three layers of four keep theirs, with a window.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from fairseq_posenc import registry
from fairseq_posenc.errors import UserError, shortened, suggest
from fairseq_posenc.specs import Item, Spec, parse, split_options, split_spec

_OWN = re.compile(r"\s*own\s*(?:\((.*)\)\s*)?")  # own, or own(NAME=VALUE,...)


def names_own(spec: str) -> bool:
    """Check whether a spec has the word ``own``."""
    return any(_OWN.fullmatch(item) for layer in split_spec(spec) for item in layer)


def expand_own(spec: str, own: Spec, num_layers: int) -> Spec:
    """Replace ``own`` in a spec by the positions that the model has.

    In layer i, ``own`` means the positions of the model's layer i. Options in brackets change
    the model's, wherever an encoding has an option of that name.

    >>> print(expand_own("2*own,own(base=500)+alibi", parse("rope,none,rope(layout=half)"), 3))
    rope,none,rope(base=500,layout=half)+alibi

    Args:
        spec: as a user writes it.
        own: the positions of the model.
        num_layers: number of layers of the model.

    Raises:
        UserError: the spec cannot be read, or the model's positions lack an option.
    """
    layers = split_spec(spec)  # `2*own` is two of them
    count = max(num_layers, len(layers))  # callers refuse a spec of more layers (`check_length`)
    # Encodings of the whole stack are in each layer; `parse` takes equal ones as one. A layer
    # without positions has the item `none`, which is left out beside others.
    own_layers = [own.select_layers([index]).items for index in range(count)]
    expanded = []
    for index, own_items in enumerate(own_layers):
        place = index % len(layers)  # the layers of a spec are repeated over the stack
        # The model's `none` is left out, and so are companions, such as a window, that are named.
        names = {item.partition("(")[0].strip() for item in layers[place]}
        left_out = {"none", *(names - {*registry.names()})}  # `registry.names` has no companions
        items = []
        for item in layers[place]:
            if (match := _OWN.fullmatch(item)) is None:
                items.append(item)
                continue
            changes = split_options("own", match[1] or "")
            meant = chain(*own_layers[place :: len(layers)])  # by this `own`, in all layers
            known = {name for x in meant for name in registry.options(x.name)}
            if unknown := sorted(changes.keys() - known):
                raise UserError(
                    f"{shortened(item)}: the model's positions there have no option "
                    f"{unknown[0]!r}; {suggest(unknown[0], known)}they are {shortened(str(own))}"
                )
            items += [_change_options(x, changes) for x in own_items if x.name not in left_out]
        expanded.append("+".join(items) or "none")
    written = join_layers(expanded)
    try:
        return parse(written)
    except UserError as error:
        raise UserError(f"{shortened(spec)}, in this model {shortened(written)}: {error}") from None


def find_doubts(text: str, new: Spec, own: Spec, num_layers: int) -> Iterator[str]:
    """Say what the spec ``text``, parsed as ``new``, may do to a model against a user's wish."""
    encodings = {*registry.names()}  # without windows, caps and so on
    if not new.names & encodings:
        advice = " (own+... keeps them)" if own.names & encodings - {"none"} else ""
        yield f"the model has no positions now: {shortened(text)} names none{advice}"
    # The items of each layer as written, by name: they tell defaults that a user wrote from others.
    written = [{x.partition("(")[0].strip(): x for x in layer} for layer in split_spec(text)]
    for item in own.input_items if any("own" in x for x in written) else ():
        if not all({"own", item.name} & x.keys() for x in written):
            yield f"{item} acts on the input, so layers without own keep it, too"
    for index in (x for x in range(num_layers) if "own" not in written[x % len(written)]):
        layers = [spec.layers[index % len(spec.layers)] for spec in (new, own)]
        rotations = [[x for x in layer if x.encoding.acts_on == "rotation"] for layer in layers]
        known = {*encodings, *(x.name for x in layers[0])}
        for item, present in zip(*rotations):  # a layer has at most one
            name = shortened(str(item))
            if others := "+".join(str(x) for x in layers[1] if x.name not in known):
                yield f"{name} leaves out the model's {shortened(others)}: own+... keeps it"
            options = written[index % len(written)][item.name].partition("(")[2].partition(")")[0]
            unset = registry.options(item.name).keys() - split_options(item.name, options).keys()
            if lost := tuple(x for x in present.options if x[0] in unset):
                theirs = f"the model's {shortened(str(present._replace(options=lost)))}"
                yield f"{name} lacks options of {theirs}: write them, or use own(...)"


def join_layers(layers: Sequence[str]) -> str:
    """Join the specs of all layers to the shortest list whose repetition begins with them."""
    # A list with this period equals itself when it is shifted by the period.
    period = next(n for n in range(1, len(layers) + 1) if layers[n:] == layers[:-n])
    return ",".join(layers[:period])


def _change_options(item: Item, changes: Mapping[str, str]) -> str:
    """Write an item of the model's spec, with the changes of options that its encoding has."""
    known = registry.options(item.name)
    scaled = dict(item.options).get("scaling")
    if scaled is not None and changes.get("scaling", "none") != "none":
        raise UserError(
            f"own(scaling={shortened(changes['scaling'])}): the model's rotations are scaled "
            f"already, by {shortened(str(scaled))}; to replace that, write the encoding itself: "
            f"{shortened(str(item))} with another scaling"
        )
    options = dict(item.options) | {k: v for k, v in changes.items() if k in known}
    return str(item._replace(options=tuple(options.items())))
