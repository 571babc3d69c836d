"""Builds the encodings of a spec for a stack: at the input, shared by all layers, in each layer.

The library and the stacks of fairseq and transformers build their encodings here, from a spec and
the sizes of the stack. Before that, they check and count them on drafts: encodings on the device
"meta", which have shapes, but no values, and take no memory.
"""

import os
from collections import Counter
from collections.abc import Mapping
from functools import cache, reduce
from operator import and_

import torch
from torch import Tensor

from fairseq_posenc import backends
from fairseq_posenc.encodings.base import Dims, Encoding, Encodings, SharedEncodings, find_first
from fairseq_posenc.encodings.term import ByDistance, CountedRows, NumbersByPair, RowsOf
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.errors import UserError, counted
from fairseq_posenc.mask import NO_MASK, Mask
from fairseq_posenc.positions import Positions
from fairseq_posenc.specs import Item, Items, Spec, name_modules


def build_encodings(items: Mapping[str, Item], dims: Dims) -> Encodings:
    """Build encodings from items by module name, and initialize their parameters.

    Raises:
        UserError: an encoding cannot work with these sizes.
    """
    for name, size in (
        ("width", dims.embed_dim),
        ("number of attention heads", dims.num_heads),
        ("number of positions", dims.max_positions),
        ("length in training", dims.pretrained_length),  # None: the number of positions
        ("width of a head", dims.own_head_dim),  # None: computed, and checked below
    ):
        if size is not None and size < 1:
            raise UserError(f"the {name} must be at least 1, not {size}")
    if dims.own_head_dim is None and dims.embed_dim % dims.num_heads:
        heads = counted(dims.num_heads, "attention heads")
        raise UserError(f"width {dims.embed_dim} cannot be divided among {heads}")
    # `item.encoding` is the class of an encoding.
    built = {name: item.encoding(dims, **dict(item.options)) for name, item in items.items()}
    for encoding in built.values():
        encoding.reset_parameters()
    return Encodings(built)


def build_input(spec: Spec, dims: Dims) -> Encodings | None:
    """Build the encodings that add vectors to the token embeddings; None without any."""
    items = name_modules(spec.input_items)
    return build_encodings(items, _find_input_dims(spec, dims)) if items else None


def build_shared(spec: Spec, dims: Dims) -> SharedEncodings:
    """Build the encodings that layers share."""
    items = spec.shared_modules  # those with one module for all layers that use them, by its name
    # A kind of layer uses what holds for the whole stack (`documents`), and its own encodings.
    used = [spec.whole_stack + layer for layer in spec.layer_kinds]
    kinds = [tuple(name for name, item in items.items() if item in kind) for kind in used]
    return SharedEncodings(build_encodings(items, dims).as_dict(), kinds)


def build_layer(spec: Spec, dims: Dims, index: int = 0) -> Encodings:
    """Build the encodings whose modules belong to a layer; layers are counted from 0."""
    return build_encodings(spec.layer_modules(index), dims)


def draft_terms(spec: Spec, dims: Dims, backend: str) -> list[Terms]:
    """Draft the terms of each kind of layer (``Spec.layer_kinds``), for a single token.

    Raises:
        UserError: the encodings need too much memory; and what :func:`draft_layer` refuses.
    """
    check_size(spec, dims, layers=1)  # a stack has at least one
    return [draft_layer(spec, dims, kind, backend) for kind in range(len(spec.layer_kinds))]


def draft_layer(spec: Spec, dims: Dims, kind: int, backend: str = "auto") -> Terms:
    """Compute the terms of a single token on "meta", and refuse what cannot work.

    Args:
        spec: encodings of all layers.
        dims: sizes of the stack.
        kind: index of the layer's encodings in ``Spec.layer_kinds``.
        backend: ``auto``, or the name of the backend that must be used.

    Raises:
        UserError: the encodings do not work together or on the backend.
    """

    def project(rows: Tensor) -> tuple[Tensor, Tensor]:
        """Shape rows as a layer's projections to queries and to keys would, ``(H, R, D)`` each."""
        projected = rows.new_empty(dims.num_heads, rows.size(0), dims.head_dim)
        return projected, projected

    classes = tuple(item.encoding for item in spec.items)
    terms, limits = _draft_terms_and_limits(spec, dims, spec.layer_kinds[kind], classes)
    backends.check(backend, terms.projected(project), dims.head_dim, limits)
    return terms


@cache
def _draft_terms_and_limits(spec: Spec, dims: Dims, layer: Items, _: object) -> tuple[Terms, Mask]:
    """Compute the terms and limits of a kind of layer, once for equal stacks and classes."""
    token = _make_one_token()
    for item in spec.whole_stack:  # none has terms: some restart positions or draw random ones
        token = _build_draft(item, spec, dims).number(token)
    named = {name: _build_draft(item, spec, dims) for name, item in name_modules(layer).items()}
    encodings = Encodings(named)
    x = torch.empty(1, 1, dims.embed_dim, device="meta")  # the input of a layer
    terms = encodings.terms(token) | encodings.input_terms(x, token)
    _refuse_too_narrow_tables(spec, layer, terms)
    if token.drawn is not None:  # an encoding of the whole stack has drawn a random position
        _refuse_beside_random(spec, dims, layer, token)
    limits = list_limits(spec, dims, spec.whole_stack + layer)
    # A window never hides its `first_keys`, the keys of the first tokens. Two windows would become
    # one, of the smaller size, that also shows first keys which only the other window hides.
    windows = [limit for limit in limits if limit.window is not None]
    if len(windows) > 1 and any(limit.first_keys is not None for limit in windows):
        fault = "a layer has two windows, and one hides the first keys of the other"
        raise UserError(f"{spec}: {fault}: leave one out")
    return terms, reduce(and_, limits, NO_MASK)


def list_limits(spec: Spec, dims: Dims, items: Items) -> list[Mask]:
    """List how encodings of a spec limit the visible keys, for a single token on "meta"."""
    return [_build_draft(item, spec, dims).mask(_make_one_token()) for item in items]


def _refuse_too_narrow_tables(spec: Spec, layer: Items, terms: Terms) -> None:
    """Refuse rows that queries or keys are multiplied by, where an encoding widens these."""
    # "channel" multiplies both; each layer projects rows of "layer" to rows of "query" and "key".
    multiplied: tuple[RowsOf, ...] = ("query", "key", "channel", "layer")  # and CountedRows, below
    wider = [item.name for item in layer if item.encoding.widens]  # as `pope`, to 2 D
    if wider and (terms.has(CountedRows) or any(terms.rows(of) for of in multiplied)):
        fault = f"{wider[0]} makes queries and keys wider"
        raise UserError(f"{spec}: {fault}, so tables that are multiplied by them do not fit")


def _refuse_beside_random(spec: Spec, dims: Dims, layer: Items, token: Positions) -> None:
    """Refuse encodings that would ignore, or do not know, the random positions of ``token``."""
    if spec.rotates_source:  # by the positions of an encoder's tokens
        raise UserError(f"{spec}: a decoder does not know the random positions of its encoder")
    for item in (*spec.input_items, *layer):
        reason = "counts in sentences" if item.encoding.counts_in_sentences else ""
        # Distances are of the counted positions; only ALiBi's, a Decay, are of the random ones.
        if Terms(_build_draft(item, spec, dims).terms(token)).has(ByDistance, NumbersByPair):
            reason = "uses distances between tokens"
        if reason:
            raise UserError(f"{spec}: {item.name} {reason}, and would ignore random positions")


def check_size(spec: Spec, dims: Dims, layers: int, always_allocated: int = 0) -> None:
    """Refuse tables that do not fit into this machine's memory, before they are allocated.

    Args:
        spec: encodings of all layers.
        dims: sizes of the stack.
        layers: number of layers of the stack.
        always_allocated: number of float32 values in a table that fairseq allocates, before the
            tables of the spec replace it.
    """
    if not hasattr(os, "sysconf"):  # Windows: torch reports a failed allocation
        return
    needed = 4 * max(always_allocated, sum(count_parameters(spec, dims, layers).values()))  # bytes
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory:
        sizes = f"{needed / 1e9:,.0f} GB, and this machine has {memory / 1e9:,.0f}"
        options = "(max_positions, max_source_positions, max_target_positions, tokens_per_sample)"
        what = f"{dims.max_positions:,} positions"
        raise UserError(f"{what} would take {sizes}: choose fewer {options}")


def count_parameters(spec: Spec, dims: Dims, layers: int) -> dict[str, int]:
    """Count the elements of each position parameter of a stack by its name in a fairseq stack.

    ``layers.*`` means all layers, whose elements are added up:

    >>> dims = Dims(embed_dim=8, num_heads=2, max_positions=4)
    >>> count_parameters(Spec(whole_stack=(), layers=((Item("m1"),), ())), dims, layers=5)
    {'layers.*.self_attn.encodings.m1.table.weight': 12}
    """
    groups = [("embed_positions.", name_modules(spec.input_items), 1), ("", spec.shared_modules, 1)]
    period = len(spec.layers)  # every layer with the same remainder has the same encodings
    for index in range(min(layers, period)):
        count = len(range(index, layers, period))
        groups.append(("layers.*.self_attn.", spec.layer_modules(index), count))
    sizes: Counter[str] = Counter()
    for prefix, items, count in groups:
        for module, item in items.items():
            for name, parameter in _build_draft(item, spec, dims).named_parameters():
                sizes[f"{prefix}encodings.{module}.{name}"] += count * parameter.numel()
    return dict(sizes)


def find_id_readers(spec: Spec, dims: Dims) -> dict[str, Encoding]:
    """Draft the encodings that read positions, by their text in a spec: ``t5(axes=2)``."""
    drafts = {str(item): _build_draft(item, spec, dims) for item in spec.items}
    return {item: draft for item, draft in drafts.items() if draft.axes}  # 0: reads none


def _build_draft(item: Item, spec: Spec, dims: Dims) -> Encoding:
    """Build an encoding of a stack on the device "meta"."""
    sizes = _find_input_dims(spec, dims) if item in spec.input_items else dims
    return _build_on_meta(item, sizes, (item.encoding,))


def _find_input_dims(spec: Spec, dims: Dims) -> Dims:
    """Find the sizes for the encoding of the input.

    With random positions its table has a row for every position that can be drawn.
    """
    drafts = (_build_on_meta(item, dims, (item.encoding,)) for item in spec.whole_stack)
    drawn_below = find_first(draft.drawn_below for draft in drafts)
    return dims if drawn_below is None else dims._replace(max_positions=drawn_below)


@cache
def _build_on_meta(item: Item, dims: Dims, _: object) -> Encoding:
    """Build an encoding on "meta", once for equal arguments; the last one holds its class."""
    with torch.device("meta"):
        return build_encodings(name_modules([item]), dims).as_list()[0]


def _make_one_token() -> Positions:
    """Make the positions of a single token, on the device "meta"."""
    return Positions.from_padding(torch.zeros(1, 1, dtype=torch.bool, device="meta"))
