"""The position state of a forward pass, which all layers of a stack share.

The letters of shapes are those of :mod:`~fairseq_posenc.encodings.base`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from operator import and_, or_
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from fairseq_posenc.backends.forward_cache import PerForwardCache, is_reentrant_recomputation
from fairseq_posenc.backends.mask import Mask
from fairseq_posenc.encodings.base import Encoding, Encodings
from fairseq_posenc.encodings.locality import Locality, NeededKeys
from fairseq_posenc.encodings.rotation import Rotation
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.errors import UserError
from fairseq_posenc.positions import Positions, Span

if TYPE_CHECKING:
    from fairseq_posenc.assembly import Assembly


class Shared(NamedTuple):
    """The position state of a forward pass, computed once for all layers of a stack.

    Attributes:
        positions: positions of the tokens.
        terms: terms that all layers share.
        rotation: rotation of the queries and keys of the last T tokens, or None.
        source: rotation of the source's keys, for rotary encoder-decoder attention.
        source_ids: positions of these keys, ``(B or 1, S)``.
        source_counted: whether these positions count the tokens.
        locality: limits of the keys that a query may see.
        span: span of the terms, if they have room for later steps of decoding.
        cache: cache of values that the first layer computes for all layers.
        kinds: if layers differ, the state of each kind of layer (see :meth:`of_kind`).
        recompute_terms: computes ``terms`` again, with another autograd graph.
        rotate_ids: computes the rotation at positions ``(B or 1, S)``.
        stack: spec and sizes of the stack, by which layers recognise their stack.
    """

    positions: Positions
    terms: Terms = Terms()
    rotation: Rotation | None = None
    source: Rotation | None = None
    locality: Locality = Locality()
    span: Span | None = None
    cache: PerForwardCache | None = None
    kinds: tuple[Shared, ...] = ()
    recompute_terms: Callable[[], Terms] | None = None
    rotate_ids: Callable[[Tensor], Rotation | None] | None = None
    stack: Assembly | None = None
    source_ids: Tensor | None = None
    source_counted: bool = True

    @classmethod
    def compute(
        cls,
        encodings: Encodings,
        positions: Positions,
        span: Span | None = None,
        compute_terms: Callable[[str, Encoding], Terms] | None = None,
    ) -> Shared:
        """Compute the position state from the encodings of a stack, each of them once.

        Args:
            encodings: result of :meth:`Assembly.build_stack`.
            positions: positions of the tokens.
            span: span of the terms, if they have room for later steps of decoding.
            compute_terms: computes the terms of an encoding, from its name and itself; by default
                those of the tokens.
        """
        positions = encodings.number(positions)
        now = positions.span()
        named = encodings.as_dict()
        ids = positions.queries(positions.places)
        rotations = {name: encoding.rotation(ids) for name, encoding in named.items()}

        def compute(name: str) -> Terms:
            if compute_terms is None:
                return named[name].terms(now, positions)
            return compute_terms(name, named[name])

        def combine(names: tuple[str, ...], terms: Callable[[str], Terms]) -> Terms:
            return reduce(or_, map(terms, names), Terms())

        terms = {name: compute(name) for name in named}
        limits = {name: encoding.locality(positions) for name, encoding in named.items()}
        states = [
            cls(
                positions,
                combine(names, terms.__getitem__),
                next((rotations[name] for name in names if rotations[name] is not None), None),
                locality=reduce(and_, (limits[name] for name in names), Locality()),
                span=span,
                cache=None if span else PerForwardCache(),
                recompute_terms=partial(combine, names, compute),
                rotate_ids=partial(encodings.rotation, kind=kind),
            )
            for kind, names in enumerate(encodings.kinds)
        ]
        return states[0] if len(states) == 1 else cls(positions, kinds=tuple(states))

    def _refuse_kinds(self, method: str) -> None:
        if self.kinds:
            raise UserError(
                f"the layers of this stack differ: call shared.of_kind(layer.kind).{method}(...)"
            )

    def of_stack(self, stack: Assembly) -> Shared:
        """Set the attribute ``stack``, also in the state of each kind of layer."""
        kinds = tuple(kind._replace(stack=stack) for kind in self.kinds)
        return self._replace(stack=stack, kinds=kinds)

    def of_kind(self, kind: int) -> Shared:
        """Select the state of a kind of layer (see :class:`~fairseq_posenc.specs.Spec`)."""
        return self.kinds[kind] if self.kinds else self

    def layer_terms(self) -> Terms:
        """Select the terms for a layer.

        When reentrant checkpointing runs the layer again, they are computed again: its backward
        pass frees the graph of a layer's arguments, and the layers of a stack get the same terms.
        """
        if self.recompute_terms is not None and is_reentrant_recomputation():
            return self.recompute_terms()
        return self.terms

    def needed_keys(self) -> NeededKeys:
        """Find the keys that later queries may see, once for all layers."""
        limits = self.locality
        cache = self.cache
        return cache.get("needed", limits, limits.needed_keys) if cache else limits.needed_keys()

    def layer_rotation(self) -> Rotation | None:
        """Select the rotation for a layer; a trained one is computed again as terms are."""
        rotation = self.rotation
        positions = self.positions
        if self.rotate_ids is None or rotation is None or not rotation.is_trained:
            return rotation
        if not is_reentrant_recomputation():
            return rotation
        return self.rotate_ids(positions.queries(positions.places))

    def rotate_last(self, count: int) -> Rotation | None:
        """Compute the rotation of the last tokens, whose keys a host caches unrotated."""
        if self.rotate_ids is None:
            return None
        places = self.positions.places
        compute = partial(self.rotate_ids, places[:, places.size(1) - count :])
        return self.cache.get("last", (places, count), compute) if self.cache else compute()

    def with_source(self, encodings: Encodings, ids: Tensor, counted: bool = True) -> Shared:
        """Add the rotation of the source's keys at positions ``ids``, ``(B or 1, S)``."""
        states = [
            state._replace(
                source=encodings.rotation(ids, kind), source_ids=ids, source_counted=counted
            )
            for kind, state in enumerate(self.kinds or (self,))
        ]
        return self._replace(kinds=tuple(states)) if self.kinds else states[0]

    def rotate(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate query and key of the last T tokens, both ``(B, H, T, D)``.

        Raises:
            UserError: they are of another number of tokens or another width.
        """
        self._refuse_kinds("rotate")
        tgt_len = self.positions.tgt_len
        for name, x in {"query": query, "key": key}.items():
            width = x.size(-1) if self.stack is None else self.stack.dims.head_dim
            if x.dim() != 4 or x.shape[2:] != (tgt_len, width):
                raise UserError(
                    f"{name} {tuple(x.shape)} must be (batch, heads, {tgt_len}, {width}), of the "
                    "new tokens"
                )
        if (rotation := self.layer_rotation()) is None:
            return query, key
        return rotation.rotate_queries(query), rotation.rotate_keys(key)

    def mask(self, direction: str) -> Mask:
        """Make the mask of a direction and the padding among the tokens."""
        self._refuse_kinds("mask")
        positions = self.positions
        mask = Mask(direction, cache=self.cache, locality=self.locality)
        padding = mask.cached("padding", (positions.tokens,), lambda: positions.padding)
        return mask._replace(key_padding=padding)
