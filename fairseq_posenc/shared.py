"""The position state of a forward pass, which all layers of a stack share.

A stack computes it before its first layer (:meth:`Shared.compute`) and hands it to each layer. If
layers differ, as in ``3*rope,none``, they are of several kinds, and each layer takes the state of
its kind, a :class:`LayerShared`. The letters of shapes are those of
:mod:`~fairseq_posenc.encodings.base`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from operator import and_, or_
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from fairseq_posenc.backends.forward_cache import PerForwardCache, is_reentrant_recomputation
from fairseq_posenc.backends.mask import Mask
from fairseq_posenc.encodings.base import Encodings
from fairseq_posenc.encodings.locality import Locality, NeededKeys
from fairseq_posenc.encodings.rotation import Rotation
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.errors import UserError
from fairseq_posenc.positions import Positions

if TYPE_CHECKING:
    from fairseq_posenc.assembly import Assembly


class LayerShared(NamedTuple):
    """The position state that the layers of one kind share in a forward pass.

    Attributes:
        positions: positions of the tokens.
        terms: terms that these layers share.
        rotation: rotation of the queries and keys of the last T tokens, or None.
        source_rotation: rotation of the source's keys, for rotary encoder-decoder attention.
        locality: limits of the keys that a query may see.
        cache: values that the first layer computes for all layers, or None.
        recompute_terms: computes ``terms`` again, with another autograd graph.
        rotate_ids: computes the rotation at positions ``(B or 1, S)``.
    """

    positions: Positions
    terms: Terms = Terms()
    rotation: Rotation | None = None
    source_rotation: Rotation | None = None
    locality: Locality = Locality()
    cache: PerForwardCache | None = None
    recompute_terms: Callable[[], Terms] | None = None
    rotate_ids: Callable[[Tensor], Rotation | None] | None = None

    def layer_terms(self) -> Terms:
        """Select the terms for a layer.

        When reentrant checkpointing runs a layer again, they are computed again: the backward pass
        of the first layer frees the graph of its arguments, and all layers have these terms.
        """
        if self.recompute_terms is not None and is_reentrant_recomputation():
            return self.recompute_terms()
        return self.terms

    def needed_keys(self) -> NeededKeys:
        """Find the keys that later queries may see, once for all layers."""
        limits = self.locality
        if self.cache is None:
            return limits.needed_keys()
        return self.cache.get("needed", tuple(limits), limits.needed_keys)  # again for other limits

    def layer_rotation(self) -> Rotation | None:
        """Select the rotation for a layer; a trained one is computed again as terms are."""
        is_trained = self.rotation is not None and self.rotation.is_trained
        if self.rotate_ids is None or not is_trained or not is_reentrant_recomputation():
            return self.rotation
        return self.rotate_ids(self.positions.query_places)

    def rotate_last(self, count: int) -> Rotation | None:
        """Compute the rotation of the last ``count`` tokens, whose keys a host caches unrotated."""
        if self.rotate_ids is None:
            return None
        ids = self.positions.places  # counted or given ids, or the random ones in their place
        compute = partial(self.rotate_ids, ids[:, ids.size(1) - count :])
        return self.cache.get("last", (ids, count), compute) if self.cache else compute()

    def rotate(
        self, query: Tensor, key: Tensor, head_dim: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Rotate query and key of the last T tokens, both ``(B, H, T, D)``.

        Args:
            query: the queries.
            key: the keys.
            head_dim: D, if it is to be checked.

        Raises:
            UserError: they have another shape.
        """
        tgt_len = self.positions.tgt_len
        for name, x in {"query": query, "key": key}.items():
            width = x.size(-1) if head_dim is None else head_dim
            if x.dim() != 4 or x.shape[2:] != (tgt_len, width):
                raise UserError(
                    f"{name} {tuple(x.shape)} must be (batch, heads, {tgt_len}, {width}), of the "
                    "new tokens"
                )
        if (rotation := self.layer_rotation()) is None:
            return query, key
        return rotation.rotate_queries(query), rotation.rotate_keys(key)

    def mask(self, direction: str) -> Mask:
        """Make the mask of a direction, with the padding of the tokens."""
        padding = self.positions.padding
        return Mask(direction, key_padding=padding, cache=self.cache, locality=self.locality)


class Shared(NamedTuple):
    """The position state of a forward pass, computed once for all layers of a stack."""

    positions: Positions
    kinds: tuple[LayerShared, ...]  # the state of each kind of layer, by ``Spec.layer_kind``
    stack: Assembly | None = None  # spec and sizes; `StackPositions` sets it, layers compare it
    source: Positions | None = None  # of an encoder's output, for rotary attention to it

    @classmethod
    def compute(
        cls,
        encodings: Encodings,
        positions: Positions,
    ) -> Shared:
        """Compute the position state from the encodings of a stack, each of them once.

        Args:
            encodings: result of :meth:`Assembly.build_stack`.
            positions: positions of the tokens.
        """
        positions = encodings.number(positions)
        span = positions.span()
        named = encodings.as_dict()
        ids = positions.query_places

        def terms_of(name: str) -> Terms:
            return named[name].combined_terms(span, positions)

        def combine(names: tuple[str, ...], find_terms: Callable[[str], Terms]) -> Terms:
            return reduce(or_, map(find_terms, names), Terms([]))

        terms = {name: terms_of(name) for name in named}
        rotations = {name: encoding.rotation(ids) for name, encoding in named.items()}
        limits = {name: encoding.locality(positions) for name, encoding in named.items()}
        kinds = []
        for kind, names in enumerate(encodings.kinds):
            # A spec allows a layer at most one rotation.
            rotation = next((x for name in names if (x := rotations[name]) is not None), None)
            state = LayerShared(
                positions,
                terms=combine(names, terms.__getitem__),
                rotation=rotation,
                locality=reduce(and_, (limits[name] for name in names), Locality()),
                cache=PerForwardCache(),
                recompute_terms=partial(combine, names, terms_of),
                rotate_ids=partial(encodings.rotation, kind=kind),
            )
            kinds.append(state)
        return cls(positions, tuple(kinds))

    def of_kind(self, kind: int) -> LayerShared:
        """Select the state of a kind of layer (see :class:`~fairseq_posenc.specs.Spec`)."""
        return self.kinds[kind]

    def with_source(self, encodings: Encodings, source: Positions) -> Shared:
        """Add the rotation of a source's keys at its positions."""
        kinds = tuple(
            state._replace(source_rotation=encodings.rotation(source.ids, kind))
            for kind, state in enumerate(self.kinds)
        )
        return self._replace(kinds=kinds, source=source)

    def rotate(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate query and key of the last T tokens, both ``(B, H, T, D)``.

        Raises:
            UserError: they have another shape, or the layers of the stack differ.
        """
        head_dim = None if self.stack is None else self.stack.dims.head_dim
        return self._only_kind("rotate").rotate(query, key, head_dim)

    def mask(self, direction: str) -> Mask:
        """Make the mask of a direction, with the padding of the tokens.

        Raises:
            UserError: the layers of the stack differ.
        """
        return self._only_kind("mask").mask(direction)

    def _only_kind(self, method: str) -> LayerShared:
        """Return the state of all layers; refuse a call if the layers of the stack differ."""
        if len(self.kinds) > 1:
            raise UserError(
                f"the layers of this stack differ: call shared.of_kind(layer.kind).{method}(...)"
            )
        return self.kinds[0]
