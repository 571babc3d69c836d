"""Computes the steps of attention in a layer, for fairseq's, transformers' and our own modules.

B batch, T queries, S keys, H heads, D head size, C model size, R rows of a table by distance.
"""

from typing import TYPE_CHECKING, cast

from torch import Tensor, nn

from fairseq_posenc.backends.base import AttentionCall
from fairseq_posenc.backends.projected_rows import ProjectedRows
from fairseq_posenc.encodings.base import Encodings
from fairseq_posenc.encodings.rotation import Rotation
from fairseq_posenc.encodings.term import Decay, States
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.mask import Mask
from fairseq_posenc.modules.cache import KeyValueCache
from fairseq_posenc.shared import Shared


class AttentionCore:
    """Mixin with the steps of attention in a layer.

    Self-attention calls ``project`` and ``make_call``, passes the call to a backend, and calls
    ``merge_heads`` on the result.

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

        Keys and values may have fewer heads, each for a group of the queries' heads.
        """
        query = self.split_heads(self.q_proj(x))
        key = self.split_heads(self.k_proj(x))
        return query, key, self.split_heads(self.v_proj(x))

    def make_call(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        shared: Shared,
        inputs: Tensor | None = None,
        cache: KeyValueCache | None = None,
        mask: Mask | None = None,
        terms: Terms | None = None,
        dropout: float = 0.0,
        need_weights: bool = False,
    ) -> AttentionCall:
        """Make the arguments of a backend: rotate, extend the cache, collect terms and mask.

        Args:
            query: queries of the last T of S tokens, projected, not rotated, ``(B, H, T, D)``.
            key: keys of the same tokens, with H heads or fewer, not rotated. transformers models
                also pass those of earlier tokens, which their own cache keeps.
            value: values of the same tokens as ``key``.
            shared: position state of the forward pass, for this kind of layer.
            inputs: the layer's input, ``(B, T, C)``, or without a cache of all tokens, ``(B, S,
                C)``; forget gates and states are computed from it. None for neither.
            cache: the layer's cache, which is extended.
            mask: mask of all S keys; by default from the direction, and from ``shared``.
            terms: terms for all S keys; by default :meth:`compute_terms`.
            dropout: probability of dropping a weight.
            need_weights: whether the backend must return the weights.
        """
        positions = shared.positions
        query, key = self._rotate(query, key, shared)
        decay = states = None  # sums of the logarithms of forget gates; second, narrower queries
        if inputs is not None:
            past = None if cache is None else cache.past_decay()  # before `cache` is extended
            decay = self.encodings.decay(inputs, positions, past)
            states = self.encodings.states(positions.queries(inputs))
        tgt_len, src_len = query.size(2), positions.src_len
        places = None
        if cache is not None:  # it may drop all but `needed_keys`; `with_gaps` pads gaps for T > 1
            kept = cache.extend(key, value, decay, shared.needed_keys())
            key, value, decay, places = kept.with_gaps(tgt_len, src_len)
        if terms is None:
            terms = self.compute_terms(shared)
        if mask is None:
            mask = shared.mask.with_direction(self.direction)
        # No query sees dropped keys: the first of S, or all but those at `places`, `(K,)` indices.
        dropped = src_len - key.size(2)
        if places is not None:
            places = places.to(query.device)
            terms = Terms([term.select_keys(places, tgt_len, src_len) for term in terms])
            mask = mask.select_keys(places)
        elif dropped:
            terms = Terms([term.without_first_keys(dropped) for term in terms])
            mask = mask.without_dropped_keys(dropped)
        if states is not None:
            terms |= Terms([States(states)])
        if decay is not None:
            terms |= Terms([Decay.split_heads(decay, query.size(1))])  # H, or 2 H in encoders
        return AttentionCall(query, key, value, terms, mask, dropout, need_weights)

    def _rotate(self, query: Tensor, key: Tensor, shared: Shared) -> tuple[Tensor, Tensor]:
        """Rotate queries ``(B, H, T, D)``, and the keys of the last tokens, T or more."""
        of_queries = of_keys = self.rotation(shared)
        if key.size(2) != query.size(2):  # keys that were cached unrotated
            of_keys = self.rotation(shared, key.size(2))
        if of_queries is None or of_keys is None:
            return query, key
        return of_queries.rotate_queries(query), of_keys.rotate_keys(key)

    def rotation(self, shared: Shared, count: int | None = None) -> Rotation | None:
        """Select the rotation of the last tokens: the stack's, this layer's, or None.

        Args:
            shared: position state of the forward pass, for this kind of layer.
            count: number of tokens; by default T.
        """
        count = shared.positions.tgt_len if count is None else count
        rotation = shared.rotation_of_last(count)
        if rotation is not None or not len(self.encodings):  # encodings of this layer alone
            return rotation
        return self.encodings.rotation(shared.positions.places[:, -count:])  # random: `randomized`

    def collect_terms(self, shared: Shared) -> Terms:
        """Combine the terms of the stack and of this layer."""
        terms = shared.layer_terms()
        return terms | self.encodings.terms(shared.positions) if len(self.encodings) else terms

    def compute_terms(self, shared: Shared, rows: ProjectedRows | None = None) -> Terms:
        """Combine the terms of stack and layer; project rows by distance, as DeBERTa's layers do.

        Args:
            shared: position state of the forward pass, for this kind of layer.
            rows: those that earlier steps of decoding have projected; new ones are added.
        """
        terms = self.collect_terms(shared)
        if rows is None:
            return terms.projected(self._project_rows)
        return rows.project(terms, shared.positions, self._project_rows)

    def _project_rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Project rows by distance, ``(R, C)``, as queries and as keys, both ``(H, R, D)``."""
        projected = (self.q_proj(rows), self.k_proj(rows))
        query, key = (x.unflatten(-1, (-1, self.head_dim)).transpose(0, 1) for x in projected)
        return query, key.repeat_interleave(len(query) // len(key), 0)  # k0, k1: k0, k0, k1, k1

    def split_heads(self, x: Tensor) -> Tensor:
        """Split the last dimension of ``(B, T, C)`` or ``(T, B, C)`` into heads."""
        heads = x.unflatten(-1, (-1, self.head_dim))
        return heads.permute((0, 2, 1, 3) if self.batch_first else (1, 2, 0, 3))  # [B, H, T, D]

    def merge_heads(self, attended: Tensor) -> Tensor:
        """Merge the heads of ``(B, H, T, D)``, and project them to the layer's output."""
        merged = attended.permute((0, 2, 1, 3) if self.batch_first else (2, 0, 1, 3)).flatten(2)
        return cast("Tensor", self.out_proj(merged))  # [B, T, C]
