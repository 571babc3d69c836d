"""The position state of a forward pass, which all layers of a stack share.

A stack computes it before its first layer (:func:`compute_shared`) and hands it to each layer. If
layers differ, as in ``3*rope,none``, they are of several kinds, and each layer gets the state of
its kind. B batch, S all tokens, whose last T are the queries (all of them, except in a step of
decoding).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from operator import and_, or_
from typing import NamedTuple

from torch import Tensor

from fairseq_posenc.backends.forward_cache import PerForwardCache, is_reentrant_recomputation
from fairseq_posenc.backends.mask import DIRECTIONS, Mask
from fairseq_posenc.encodings.base import Dims, Encodings, find_first
from fairseq_posenc.encodings.locality import Locality, NeededKeys
from fairseq_posenc.encodings.rotation import Rotation
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.errors import UserError
from fairseq_posenc.positions import Positions
from fairseq_posenc.specs import Spec


class Shared(NamedTuple):
    """The position state that the layers of one kind share in a forward pass.

    Attributes:
        positions: positions of the tokens.
        cache: values computed once for all layers; ``get`` also takes what a value depends on.
        terms: terms that these layers share.
        rotation: rotation of the queries and keys of the last T tokens, or None.
        locality: limits of the keys that a query may see.
        recompute_terms: computes ``terms`` again, with another autograd graph. None in fairseq's
            layers, which get the tensors of terms and rotation as arguments.
        rotate_ids: computes the rotation at positions ``(B or 1, S)``; None in fairseq's layers.
        source: positions of an encoder's output, for rotary attention to it.
        source_rotation: rotation of the source's keys.
        spec: encodings of the stack; our own layers compare it, and ``dims``, with theirs.
        dims: sizes of the stack.
    """

    positions: Positions
    cache: PerForwardCache
    terms: Terms = Terms()
    rotation: Rotation | None = None
    locality: Locality = Locality()
    recompute_terms: Callable[[], Terms] | None = None
    rotate_ids: Callable[[Tensor], Rotation | None] | None = None
    source: Positions | None = None
    source_rotation: Rotation | None = None
    spec: Spec | None = None
    dims: Dims | None = None

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
        return self.cache.get("needed", tuple(limits), limits.needed_keys)  # again for other limits

    def rotation_of_last(self, count: int) -> Rotation | None:
        """Select the rotation of the last ``count`` tokens: T, or all if keys are cached unrotated.

        It is computed again by reentrant checkpointing, as in :meth:`layer_terms`.
        """
        if self.rotate_ids is None:
            return self.rotation
        positions = self.positions
        if count != positions.tgt_len:  # computed by the first layer that needs it
            compute = partial(self.rotate_ids, positions.places[:, -count:])
            return self.cache.get("last", (positions.places, count), compute)
        if self.rotation is not None and is_reentrant_recomputation():
            return self.rotate_ids(positions.query_places)
        return self.rotation

    def mask(self, direction: str) -> Mask:
        """Make the mask of a direction, with the padding of the tokens.

        Raises:
            UserError: the direction is unknown.
        """
        if direction not in DIRECTIONS:
            raise UserError(f"unknown direction {direction!r}: choose {', '.join(DIRECTIONS)}")
        padding = self.positions.padding
        return Mask(direction, key_padding=padding, cache=self.cache, locality=self.locality)

    def with_source(self, source: Positions) -> Shared:
        """Add the rotation of a source's keys at its positions."""
        rotation = None if self.rotate_ids is None else self.rotate_ids(source.ids)
        return self._replace(source=source, source_rotation=rotation)


def compute_shared(encodings: Encodings, positions: Positions) -> tuple[Shared, ...]:
    """Compute the position state of each kind of layer; each encoding computes its part once.

    Args:
        encodings: those that layers share, with the kinds of layers that use them.
        positions: positions of the tokens.
    """
    positions = encodings.number(positions)
    named = encodings.as_dict()

    def terms_of(name: str) -> Terms:
        return named[name].combined_terms(positions)

    def combine(names: tuple[str, ...], find_terms: Callable[[str], Terms]) -> Terms:
        return reduce(or_, map(find_terms, names), Terms([]))  # `|` joins terms

    terms = {name: terms_of(name) for name in named}
    rotations = {name: x.rotation(positions.query_places) for name, x in named.items()}
    limits = {name: x.locality(positions) for name, x in named.items()}
    return tuple(
        Shared(
            positions,
            PerForwardCache(),
            terms=combine(names, terms.__getitem__),
            rotation=find_first(rotations[name] for name in names),  # a layer has at most one
            locality=reduce(and_, (limits[name] for name in names), Locality()),  # all hold
            recompute_terms=partial(combine, names, terms_of),
            rotate_ids=partial(encodings.rotation, kind=kind),
        )
        for kind, names in enumerate(encodings.kinds)
    )
