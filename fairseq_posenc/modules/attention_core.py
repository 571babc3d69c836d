"""Computes the steps of attention in a layer, for fairseq's, transformers' and our own modules.

In decoding, a cache keeps the keys and values of earlier tokens.
B batch, T queries (new tokens), S keys (all tokens), K keys that are kept, H heads, D head size, C
model size, R rows of a table by distance.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor, nn

from fairseq_posenc.backends.base import AttentionCall
from fairseq_posenc.backends.projected_rows import ProjectedRows
from fairseq_posenc.encodings.base import Encodings
from fairseq_posenc.encodings.rotation import Rotation
from fairseq_posenc.encodings.term import Decay
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.mask import NeededKeys
from fairseq_posenc.shared import Shared


class Kept(NamedTuple):
    """The K keys and values that a cache keeps; fairseq's and ours share this form.

    Attributes:
        key: rotated keys, ``(B, H, K, D)``, or of fewer heads than the queries.
        value: values, shaped as the keys, but for their width if a rotation widened the keys.
        places: the index of each key among all tokens, ascending, int64 ``(K,)`` on the CPU: 0, 7,
            8, 9 of 10, for example; None for the last K.
    """

    key: Tensor
    value: Tensor
    places: Tensor | None = None

    def list_places(self, tokens: int) -> Tensor:
        """List the places of the keys, int64 ``(K,)``; ``tokens`` is the number of all tokens."""
        if self.places is not None:
            return self.places
        return torch.arange(tokens - self.key.size(2), tokens)

    def select(self, needed: NeededKeys, tokens: int) -> "Kept":
        """Select the keys that later tokens need; ``tokens`` is S."""
        count = self.key.size(2)
        last, first = needed  # number of last keys (None: all); places of first ones, on the CPU
        if last is None or (self.places is None and count <= last):
            return self  # all kept keys are needed
        if first is None and self.places is None:  # of the last K, the last ones are needed
            # Cloned, because a slice would keep the whole tensor in memory.
            return self.map(lambda x: x[:, :, count - last :].clone(), None)
        places = self.list_places(tokens)
        stays = places >= tokens - last
        if first is not None:
            stays = stays | torch.isin(places, first)
        places = places[stays]
        index = stays.nonzero()[:, 0].to(self.key.device)
        without_gap = not len(places) or int(places[0]) == tokens - len(places)  # all are last ones
        return self.map(lambda x: x.index_select(2, index), None if without_gap else places)

    def with_gaps(self, queries: int, tokens: int) -> "Kept":
        """Insert T - 1 keys of zeros at the beginning of each gap; no query sees them.

        With T = 3, keys at the places ``ab...fgh`` become ``ab00fgh``. From a table by distance,
        ``Term.select_keys`` keeps the rows of their distances from the last query (``h``: 0), and
        T - 1 more (1 and 2). The query before the last reads each key's next row, and the first
        query the row after that. For ``b`` these are the zeros' rows, whose distances are right;
        those of ``f`` and ``g`` would be wrong. ``queries`` is T, ``tokens`` is S.
        """
        if self.places is None or queries == 1:
            return self
        places = (self.places[:, None] + torch.arange(queries)).unique()
        places = places[places < tokens]
        index = torch.searchsorted(places, self.places).to(self.key.device)

        def spread(x: Tensor) -> Tensor:
            return x.new_zeros(*x.shape[:2], len(places), x.size(3)).index_copy(2, index, x)

        return self.map(spread, places)

    def map(self, change: Callable[[Tensor], Tensor], places: Tensor | None) -> "Kept":
        """Change keys and values in the same way; ``places`` are those of the result."""
        return Kept(change(self.key), change(self.value), places)


def append_to_kept(past: Kept | None, key: Tensor, value: Tensor, tokens: int) -> Kept:
    """Append rotated keys and values of new tokens, ``(B, H, T, D)``, to those that a cache keeps.

    ``past`` is None in the first step, and without a cache; ``tokens`` is S, of all tokens.
    """
    if past is None:
        return Kept(key, value)
    places = past.places
    if places is not None:
        places = torch.cat([places, torch.arange(tokens - key.size(2), tokens)])
    keys, values = torch.cat([past.key, key], 2), torch.cat([past.value, value], 2)
    return Kept(keys, values, places)  # [B, H, K + T, D]


def use_kept(call: AttentionCall, kept: Kept, tokens: int) -> AttentionCall:
    """Replace a call's keys by the ones that a cache keeps; terms and mask lose the dropped keys.

    No query sees dropped keys: the first of all, or all but those at ``kept.places``.

    Args:
        call: queries of the last T tokens; terms and mask for all S keys.
        kept: rotated keys and values, those of the last T tokens included.
        tokens: S.
    """
    terms, mask, queries = call.terms, call.mask, call.query.size(2)
    key, value, places = kept.with_gaps(queries, tokens)
    if places is not None:
        places = places.to(key.device)
        terms = Terms([term.select_keys(places, queries, tokens) for term in terms])
        mask = mask.select_keys(places)
    elif dropped := tokens - key.size(2):
        terms = Terms([term.without_dropped_keys(dropped) for term in terms])
        mask = mask.without_dropped_keys(dropped)
    return call._replace(key=key, value=value, terms=terms, mask=mask)


class Cache:
    """Keys and values of one layer, for decoding step by step; empty before the first step."""

    def __init__(self) -> None:
        self.kept: Kept | None = None
        # All tokens that were read, including those of dropped keys; 0 in a CrossAttention's cache.
        self.tokens = 0
        self.ids: Tensor | None = None  # positions that a caller gave, (B, S) or (B, S, axes)
        self.decay: Decay | None = None  # sums of forget gates, for all tokens
        self.projected = ProjectedRows()  # by distance, for all sentences; `compute_terms` fills it

    def reorder(self, rows: Tensor) -> None:
        """Select rows of the batch, ``(new batch,)``, as beam search does after each step."""
        select = partial(torch.index_select, dim=0, index=rows)
        if self.kept is not None:
            self.kept = self.kept.map(select, self.kept.places)
        self.ids = None if self.ids is None else select(self.ids)
        self.decay = None if self.decay is None else self.decay.map(select)


class AttentionCore:
    """Mixin with the steps of attention in a layer.

    Self-attention calls ``compute_terms``, ``project`` and ``rotate_tokens``, passes a call to a
    backend, and calls ``project_output`` on the result.

    Attributes:
        batch_first: whether inputs and outputs are ``(B, T, C)``, else ``(T, B, C)``.
        head_dim: D.
        encodings: the layer's encodings, in self-attention.
        direction: ``both``; ``lr``, keys up to the query (causal); ``rl``, keys from the query on.
    """

    batch_first = True
    if TYPE_CHECKING:  # torch.jit evaluates a class's annotations, and fails on most types
        head_dim: int
        encodings: Encodings
        direction: str
        q_proj: nn.Linear
        k_proj: nn.Linear
        v_proj: nn.Linear
        out_proj: nn.Linear

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project tokens to queries, keys and values, each ``(B, H, T, D)``.

        Keys and values may have fewer heads, each for a group of query heads.
        """
        query = self.split_heads(self.q_proj(x))
        key = self.split_heads(self.k_proj(x))
        return query, key, self.split_heads(self.v_proj(x))

    def rotate_tokens(self, query: Tensor, key: Tensor, shared: Shared) -> tuple[Tensor, Tensor]:
        """Rotate queries ``(B, H, T, D)``, and the keys of the last tokens, T or more."""
        of_queries = self.rotation(shared, shared.positions.tgt_len)
        is_same = key.size(2) == query.size(2)  # else a cache holds unrotated keys (transformers)
        of_keys = of_queries if is_same else self.rotation(shared, key.size(2))
        if of_queries is None or of_keys is None:
            return query, key
        return of_queries.rotate_queries(query), of_keys.rotate_keys(key)

    def rotation(self, shared: Shared, count: int) -> Rotation | None:
        """Select the rotation of the last ``count`` tokens: the stack's, this layer's, or None."""
        if (rotation := shared.rotation_of_last(count)) is not None:
            return rotation
        return self.encodings.rotation(shared.positions.last_ids(count))

    def collect_terms(self, shared: Shared) -> Terms:
        """Combine the terms of the stack and of this layer."""
        return shared.layer_terms() | self.encodings.terms(shared.positions)

    def compute_terms(self, shared: Shared, projected: ProjectedRows | None = None) -> Terms:
        """Combine the terms of stack and layer; project rows by distance, as DeBERTa's layers do.

        Those of the layer's input (:meth:`Encodings.input_terms`) are not among them.

        Args:
            shared: position state of the forward pass, for this kind of layer.
            projected: rows that earlier steps of decoding projected, to which new ones are added;
                None in a pass without a cache.
        """
        terms = self.collect_terms(shared)
        if projected is None:
            return terms.projected(self._project_rows)
        return projected.project(terms, shared.positions, self._project_rows)

    def _project_rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Project rows by distance, ``(R, C)``, as queries and as keys, both ``(H, R, D)``."""
        projected = (self.q_proj(rows), self.k_proj(rows))
        query, key = (x.unflatten(-1, (-1, self.head_dim)).transpose(0, 1) for x in projected)
        return query, key.repeat_interleave(len(query) // len(key), 0)  # k0, k1: k0, k0, k1, k1

    def split_heads(self, x: Tensor) -> Tensor:
        """Split the last dimension of ``(B, T, C)`` or ``(T, B, C)`` into heads."""
        heads = x.unflatten(-1, (-1, self.head_dim))
        return heads.permute((0, 2, 1, 3) if self.batch_first else (1, 2, 0, 3))  # [B, H, T, D]

    def project_output(self, attended: Tensor) -> Tensor:
        """Merge the heads of ``(B, H, T, D)``, and project them to the layer's output."""
        merged = attended.permute((0, 2, 1, 3) if self.batch_first else (2, 0, 1, 3)).flatten(2)
        return cast("Tensor", self.out_proj(merged))  # [B, T, C] or [T, B, C]
