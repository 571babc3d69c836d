"""The position state of a forward pass, which all layers of a stack share.

A stack computes it before its first layer (:func:`compute_shared`) and hands it to each layer. If
layers differ, as in ``3*rope,none``, they are of several kinds, and each layer gets the state of
its kind. B batch, S all tokens, whose last T are the queries (all of them, except in a step of
decoding).
"""

from functools import partial, reduce
from operator import and_
from typing import NamedTuple

from torch import Tensor

from fairseq_posenc.encodings.base import Dims, Encoding, SharedEncodings, find_first
from fairseq_posenc.encodings.rotation import Rotation
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.mask import NO_MASK, Mask, NeededKeys, PassCache
from fairseq_posenc.positions import Positions
from fairseq_posenc.specs import Spec
from fairseq_posenc.torch_modes import is_reentrant_recomputation


class Shared(NamedTuple):
    """The position state that the layers of one kind share in a forward pass.

    Attributes:
        positions: positions of the tokens.
        mask: the keys that a query may see, without the direction of a layer. Its cache
            (:meth:`Mask.cached`) has values that the first layer of the kind computes for all;
            a layer for which one of their ``deps`` is another object computes them again.
        encodings: the encodings that these layers share, to compute terms or rotations again.
        terms: terms that these layers share.
        rotation: rotation of the queries and keys of the last T tokens, or None.
        source_rotation: rotation of the keys of an encoder's output; a decoder of fairseq with
            rotary attention to it sets this.
        stack: spec and sizes of the stack as it was built: the stack sets them, and its layers
            refuse a state with others. None where no layer compares them (transformers).
    """

    positions: Positions
    mask: Mask = NO_MASK
    encodings: tuple[Encoding, ...] = ()
    terms: Terms = Terms()
    rotation: Rotation | None = None
    source_rotation: Rotation | None = None
    stack: tuple[Spec, Dims] | None = None

    def layer_terms(self) -> Terms:
        """Select the terms for a layer.

        When reentrant checkpointing runs a layer again, they are computed again: the backward pass
        of the first layer frees the graph of its arguments, and all layers have these terms.
        """
        if is_reentrant_recomputation():
            return Terms.combine(x.all_terms(self.positions) for x in self.encodings)
        return self.terms

    def needed_keys(self) -> NeededKeys:
        """Find the keys that caches must hold for later queries, once for layers of one kind."""
        return self.mask.cached("needed", deps=self.mask.cache_deps, compute=self.mask.needed_keys)

    def rotation_of_last(self, count: int) -> Rotation | None:
        """Select the rotation of the last ``count`` tokens: T, or all if keys are cached unrotated.

        That of T tokens is computed again by reentrant checkpointing, as in :meth:`layer_terms`, if
        it is trained: of a fixed one, a later pass may have changed the frequencies (``dynamic``).
        """
        positions = self.positions
        if count != positions.tgt_len:  # computed by the first layer that needs it
            deps = (positions.ids, positions.drawn, count)  # what `last_ids` reads
            compute = partial(self.rotation_at, positions.last_ids(count))
            return self.mask.cached("last", deps, compute)
        rotating = (x for x in self.encodings if x.acts_on == "rotation")
        trains = (p.requires_grad for x in rotating for p in x.parameters())
        if is_reentrant_recomputation() and any(trains):
            return self.rotation_at(positions.query_ids)
        return self.rotation

    def rotation_at(self, ids: Tensor) -> Rotation | None:
        """Compute the rotation at positions ``ids``, ``(B or 1, S)``."""
        return find_first(encoding.rotation(ids) for encoding in self.encodings)


def compute_shared(encodings: SharedEncodings, positions: Positions) -> tuple[Shared, ...]:
    """Compute the position state of each kind of layer; each encoding computes its part once.

    Args:
        encodings: the shared encodings, with the kinds of layers that use them.
        positions: positions of the tokens.
    """
    positions = encodings.number(positions)  # restarts them in documents, draws random ones
    named = encodings.as_dict()
    terms = {name: x.all_terms(positions) for name, x in named.items()}  # with scale factors
    rotations = {name: x.rotation(positions.query_ids) for name, x in named.items()}
    masks = {name: x.mask(positions) for name, x in named.items()}
    states = []
    for names in encodings.kinds:  # the names of the encodings that a kind of layer uses
        limits = reduce(and_, (masks[name] for name in names), NO_MASK)  # all must allow a key
        shared = Shared(
            positions,
            mask=limits._replace(key_padding=positions.padding, cache=PassCache()),
            encodings=tuple(named[name] for name in names),
            terms=Terms.combine(terms[name] for name in names),
            rotation=find_first(rotations[name] for name in names),  # a layer has at most one
        )
        states.append(shared)
    return tuple(states)
