"""A spec assembled for a stack of layers: at the input, once for all layers, and in each layer."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from functools import cache, reduce
from operator import and_, or_
from typing import NamedTuple

import torch
from torch import Tensor

from fairseq_posenc.backends import check
from fairseq_posenc.backends.forward_cache import PerForwardCache
from fairseq_posenc.backends.mask import Mask
from fairseq_posenc.encodings.base import Dims, Encoding, Encodings
from fairseq_posenc.encodings.locality import Locality
from fairseq_posenc.encodings.rotation import Rotation
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.errors import UserError
from fairseq_posenc.positions import Positions, Span
from fairseq_posenc.registry import get
from fairseq_posenc.specs import Item, Layer, Spec, build, name_modules


class Assembly(NamedTuple):
    """The encodings of a spec, for a stack of given sizes.

    Attributes:
        spec: which encodings.
        dims: the sizes.
    """

    spec: Spec
    dims: Dims

    def build_input(self) -> Encodings | None:
        """Build the encodings that add vectors to the token embeddings; None where none does."""
        token = _one_token()
        adds = any(self._draft(item).embed(token) is not None for item in self.spec.input_items)
        return build(name_modules(self.spec.input_items), self._input_dims) if adds else None

    def build_stack(self) -> Encodings:
        """Build the encodings that layers share."""
        built, shared = build(self.spec.shared_modules, self.dims), self.spec.shared_modules
        built.kinds = tuple(
            tuple(name for name, item in shared.items() if item in (*self.spec.whole_stack, *kind))
            for kind in self.spec.layer_kinds
        )
        return built

    def build_layer(self, index: int = 0) -> Encodings:
        """Build the encodings of one layer's own, counted from 0."""
        return build(self.spec.layer_modules(index), self.dims)

    def trained_at(self, length: int) -> Assembly:
        """Describe the same stack with weights that were trained at a length."""
        return self._replace(dims=self.dims._replace(trained_on=length))

    def check(self, backend: str) -> list[Terms]:
        """Refuse encodings that cannot work together, or not on a backend; compute their terms.

        Args:
            backend: ``auto``, or one that must be used.

        Returns:
            The terms of a single token, without values (on the device "meta"), for each of the
            spec's kinds of layers.

        Raises:
            UserError: names them.
        """
        self.check_size()
        token = _one_token()
        for item in self.spec.whole_stack:
            if get(item.name).acts_on == "positions":
                token = self._draft(item).number(token)
        span = Span.from_lengths(1, 1, token.tokens.device)
        kinds = []
        for layer in self.spec.layer_kinds:
            terms = reduce(or_, (self._draft(item).terms(span, token) for item in layer), Terms())
            drafts = Encodings({str(n): self._draft(item) for n, item in enumerate(layer)})
            decay = drafts.decay(torch.empty(1, 1, self.dims.embed_dim, device="meta"), token)
            terms = terms.with_decay(decay, self.dims.num_heads)
            self._check_fit(layer, terms, token)
            items = [*self.spec.whole_stack, *layer]
            limits = reduce(and_, (self._draft(item).locality(token) for item in items), Locality())
            check(backend, terms.unprojected(self.dims.num_heads), self.dims.head_dim, limits)
            kinds.append(terms)
        return kinds

    def _check_fit(self, layer: Layer, terms: Terms, token: Positions) -> None:
        """Refuse encodings of a layer that change what others of it rely on."""
        of_vectors = [term.has_vectors for _, term, _ in terms.given("table", "content")]
        for item in layer:
            if get(item.name).lifts and (any(of_vectors) or terms.counted_table is not None):
                raise UserError(
                    f"{self.spec}: {item.name} makes queries and keys wider, so tables of vectors "
                    "that are multiplied with them do not fit"
                )
            if token.drawn is None:
                continue
            span = Span.from_lengths(1, 1, token.tokens.device)
            if any(self._draft(item).terms(span, token).given()):
                raise UserError(
                    f"{self.spec}: {item.name} takes the distances of tokens in their order, which "
                    "drawn positions do not change"
                )
            if dict(item.options).get("cross_attention"):
                raise UserError(
                    f"{self.spec}: the positions that an encoder draws are not known to its decoder"
                )

    def check_size(self, layers: int = 1, least: int = 0) -> None:
        """Refuse tables that this machine's memory cannot hold, before any is made.

        Args:
            layers: of the stack.
            least: numbers that are made whatever the spec.

        Raises:
            UserError: states their size.
        """
        needed = 4 * max(least, sum(self.parameters(layers).values()))
        if not hasattr(os, "sysconf"):  # on Windows nothing is known, and torch itself fails
            return
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if needed > memory:
            raise UserError(
                f"{self.dims.max_positions:,} positions would take {needed / 1e9:,.0f} GB, and "
                f"this machine has {memory / 1e9:,.0f}: choose fewer (max_positions, "
                "max_source_positions, max_target_positions, tokens_per_sample)"
            )

    def parameters(self, layers: int) -> dict[str, int]:
        """Count the numbers of every position parameter of a stack by its name in a model.

        ``layers.*`` stands for each of the layers.
        """
        sizes: Counter[str] = Counter()
        places = [("embed_positions.", name_modules(self.spec.input_items))]
        places += [("", self.spec.shared_modules)]
        places += [
            ("layers.*.self_attn.", self.spec.layer_modules(index)) for index in range(layers)
        ]
        for prefix, items in places:
            for module, item in items.items():
                for name, parameter in self._draft(item).named_parameters():
                    sizes[f"{prefix}encodings.{module}.{name}"] += parameter.numel()
        return dict(sizes)

    def _draft(self, item: Item) -> Encoding:
        return _draft(item, self._input_dims if item in self.spec.input_items else self.dims)

    @property
    def _input_dims(self) -> Dims:
        """The sizes for the encoding of the input, whose table holds all numbers that are drawn."""
        drawn = (get(item.name).drawn_from(item.options) for item in self.spec.whole_stack)
        limits = [limit for limit in drawn if limit is not None]
        return self.dims._replace(max_positions=limits[0]) if limits else self.dims


@cache
def _draft(item: Item, dims: Dims) -> Encoding:
    """Build an encoding once, for questions: shapes without memory or values."""
    with torch.device("meta"):
        (encoding,) = build(name_modules([item]), dims).each()
        return encoding


def _one_token() -> Positions:
    """Make the positions of a single token, without values."""
    tokens = torch.zeros(1, 1, dtype=torch.long, device="meta")
    return Positions.from_tokens(
        tokens, padding_idx=-1, eos_idx=-1, tgt_len=1, inspect_padding=False
    )


class Shared(NamedTuple):
    """The position state of a forward pass, computed once for all layers of a stack.

    Attributes:
        positions: of the tokens.
        terms: those that all layers share.
        rotation: of the queries and keys of the last T tokens, or None.
        source: of the source's keys, for rotary encoder-decoder attention.
        locality: of the keys that a query may see.
        span: of the terms, where they have room for later steps of decoding.
        cache: of values that the first layer computes for all.
        kinds: where layers differ, the state of each kind of them (see :meth:`of_kind`).
    """

    positions: Positions
    terms: Terms = Terms()
    rotation: Rotation | None = None
    source: Rotation | None = None
    locality: Locality = Locality()
    span: Span | None = None
    cache: PerForwardCache | None = None
    kinds: tuple[Shared, ...] = ()

    @classmethod
    def compute(
        cls,
        encodings: Encodings,
        positions: Positions,
        span: Span | None = None,
        terms_of: Callable[[str, Encoding], Terms] | None = None,
    ) -> Shared:
        """Compute the position state from the encodings of a stack, each of them once.

        Args:
            encodings: of :meth:`Assembly.build_stack`.
            positions: of the tokens.
            span: of the terms, where they have room for later steps of decoding.
            terms_of: computes the terms of an encoding by its name; by default those of the tokens.
        """
        positions = encodings.number(positions)
        tokens = positions.tokens
        now = Span.from_lengths(positions.tgt_len, tokens.size(1), tokens.device)
        named = encodings.named()
        ids = positions.queries(positions.places)
        rotations = {name: encoding.rotation(ids) for name, encoding in named.items()}
        terms = {
            name: terms_of(name, encoding) if terms_of else encoding.terms(now, positions)
            for name, encoding in named.items()
        }
        limits = {name: encoding.locality(positions) for name, encoding in named.items()}
        states = [
            cls(
                positions,
                reduce(or_, (terms[name] for name in names), Terms()),
                next((rotations[name] for name in names if rotations[name] is not None), None),
                locality=reduce(and_, (limits[name] for name in names), Locality()),
                span=span,
                cache=None if span else PerForwardCache(),
            )
            for names in encodings.kinds
        ]
        return states[0] if len(states) == 1 else cls(positions, kinds=tuple(states))

    def of_kind(self, kind: int) -> Shared:
        """Select the state of a kind of layer (see :class:`~fairseq_posenc.specs.Spec`)."""
        return self.kinds[kind] if self.kinds else self

    def with_source(self, encodings: Encodings, ids: Tensor) -> Shared:
        """Add the rotation of the source's keys at positions ``ids``, ``(B or 1, S)``."""
        states = [
            state._replace(source=encodings.rotation(ids, kind))
            for kind, state in enumerate(self.kinds or (self,))
        ]
        return self._replace(kinds=tuple(states)) if self.kinds else states[0]

    def rotate(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate query and key of the last T tokens, both ``(B, H, T, D)``."""
        if self.rotation is None:
            return query, key
        return self.rotation.rotate_queries(query), self.rotation.rotate_keys(key)

    def mask(self, direction: str) -> Mask:
        """Make the mask of a direction and the padding among the tokens."""
        positions = self.positions
        mask = Mask(direction, cache=self.cache, locality=self.locality)
        padding = mask.cached("padding", (positions.tokens,), lambda: positions.padding)
        return mask._replace(key_padding=padding)
