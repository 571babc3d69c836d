"""What a generation keeps from step to step, in fairseq's incremental state.

Terms are computed for many steps at once, and sliced at each: a step has one key more than the one
before, so by distance it needs the rows of that, and one more. A bias by pair is computed for the
queries of the steps to come.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.positions import Positions, Span

STEPS = 32  # terms are computed for a multiple of so many keys


class IncrementalCache:
    """Keys and values of a layer in fairseq's format, so that its beam reordering works on them.

    Args:
        buffer: of the layer, from fairseq's incremental state; changed.
        padding: True for padding, of all tokens, ``(B, S)``.
        keeps_all: whether keys that no later query sees are kept, too.
    """

    def __init__(
        self, buffer: dict[str, Tensor | None], padding: Tensor | None, keeps_all: bool
    ) -> None:
        self.buffer = buffer
        self.padding = padding
        self.keeps_all = keeps_all

    def past_decay(self, key: Tensor) -> Tensor | None:
        """See :class:`~fairseq_posenc.modules.cache.KeyValueCache`."""
        return self.buffer.get("prev_decay")

    def extend(
        self, key: Tensor, value: Tensor, decay: Tensor | None, needed: int | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """See :class:`~fairseq_posenc.modules.cache.KeyValueCache`."""
        past_key, past_value = self.buffer.get("prev_key"), self.buffer.get("prev_value")
        if past_key is not None and past_value is not None:
            key = torch.cat([past_key, key], dim=2)  # [B, H, S, D]
            value = torch.cat([past_value, value], dim=2)
        first = 0 if needed is None or self.keeps_all else max(key.size(2) - needed, 0)
        self.buffer.update(
            prev_key=key[:, :, first:],
            prev_value=value[:, :, first:],
            prev_key_padding_mask=self.padding,
        )
        if decay is not None:
            self.buffer["prev_decay"] = decay[:, :, first - key.size(2) :]
        return key, value, decay


def compute_step_span(positions: Positions, limit: int) -> Span:
    """Compute the distances from a last query to all keys, with room for later steps up to a limit.

    A step beyond the limit has no more room: encodings may have no more rows.
    """
    src_len = positions.tokens.size(1)
    room = -(-src_len // STEPS) * STEPS
    return Span.from_lengths(
        1, min(room, limit) if src_len <= limit else room, positions.tokens.device
    )


def cached_terms(state: Any, key: str, span: Span, compute: Callable[[Span], Terms]) -> Terms:
    """Get the terms of a span (:func:`compute_step_span`) from the cache, or compute them."""
    if key not in state or state[key][0] != span:
        state[key] = span, compute(span)
    terms: Terms = state[key][1]
    return terms


def lookahead_positions(positions: Positions, span: Span) -> Positions:
    """Extend positions to a span's keys, later ones as padding; the last are queries."""
    keys = 1 - span.low
    tokens = F.pad(  # [B, keys]
        positions.tokens, (0, keys - positions.tokens.size(1)), value=positions.padding_idx
    )
    inspect = not positions.left_padded  # then they were looked at
    return Positions.from_tokens(
        tokens, positions.padding_idx, positions.eos_idx, min(STEPS, keys), inspect_padding=inspect
    )


def slice_for_step(terms: Terms, span: Span, src_len: int) -> Terms:
    """Slice the terms of a step with ``src_len`` keys from those of :func:`lookahead_positions`.

    Args:
        terms: of many steps.
        span: that they were computed for.
        src_len: S.
    """
    sliced: dict[str, Any] = {}
    for name, term, tensor in terms.given():
        if term.rows is None:
            queries, keys = tensor.shape[2:]
            query = queries - 1 - (keys - src_len)
            sliced[name] = tensor[:, :, query : query + 1, :src_len]  # [B, H, 1, S]
    if terms.first is not None:
        sliced["first"] = terms.first[:, :src_len]  # [B, S]
    return terms._replace(**sliced).without_first_distances(1 - span.low - src_len)
