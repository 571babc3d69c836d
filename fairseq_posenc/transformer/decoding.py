"""Keeps keys, values and terms from step to step of decoding, in fairseq's incremental state.

Terms are computed for many steps at once, and each step takes a slice. By distance, a step with S
keys needs the rows of distances -(S-1) to 0, so the next step needs one row more; terms by pair
are computed for the queries of the next steps.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_posenc.encodings.locality import NeededKeys
from fairseq_posenc.encodings.term import ByDistance, Decay, Temperature, Term
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.modules.cache import Kept
from fairseq_posenc.positions import Positions, Span

STEPS = 32  # terms are computed for a multiple of this many keys
BY_TOKEN = (Temperature, Decay)  # unlike others, these cannot be computed for later steps


class IncrementalCache(NamedTuple):
    """Keys and values of a layer in fairseq's format, so that its beam reordering works on them.

    Attributes:
        buffer: the layer's buffer in fairseq's incremental state; changed in place.
        padding: True for padding, for all tokens, ``(B, S)``.
        tokens: number of all tokens, S.
    """

    buffer: dict[str, Tensor | None]
    padding: Tensor | None
    tokens: int

    def past_decay(self, key: Tensor) -> Tensor | None:
        """See :class:`~fairseq_posenc.modules.cache.KeyValueCache`."""
        return self.buffer.get("prev_decay")

    def extend(self, key: Tensor, value: Tensor, decay: Tensor | None, needed: NeededKeys) -> Kept:
        """See :class:`~fairseq_posenc.modules.cache.KeyValueCache`."""
        past_key = self.buffer.get("prev_key")
        past_value = self.buffer.get("prev_value")
        visible = Kept(key, value, decay)  # in this step; later ones may need fewer keys
        if past_key is not None and past_value is not None:
            places = self.buffer.get("prev_places")  # a row for each beam, all of them equal
            past = Kept(past_key, past_value, places=None if places is None else places[0].cpu())
            visible = past.append(key, value, decay, self.tokens)  # the decay covers the past
        stored = visible.select(needed, self.tokens)  # without keys that no later query sees
        places = stored.places
        if places is not None:  # in each row, as fairseq reorders rows
            places = places.to(key.device).expand(key.size(0), -1)
        self.buffer.update(
            prev_key=stored.key,
            prev_value=stored.value,
            prev_key_padding_mask=self.padding,  # of all tokens, also those without a key
            prev_places=places,
        )
        if stored.decay is not None:
            self.buffer["prev_decay"] = stored.decay
        return visible


def compute_step_span(src_len: int, limit: int, device: torch.device) -> Span:
    """Compute the distances from the last query to all keys, with room for the next steps.

    For 40 keys the span has room for 64. As tables may end at ``limit``, there is no room beyond it
    until there are more keys.
    """
    keys = -(-src_len // STEPS) * STEPS  # rounded up
    if src_len <= limit:
        keys = min(keys, limit)
    return Span.from_lengths(1, keys, device)


def cached_terms(state: Any, key: str, span: Span, compute: Callable[[], Terms]) -> Terms:
    """Get the terms of a span (:func:`compute_step_span`) from the state, or compute them."""
    kept = state.get(key)  # (span, terms) of an earlier step
    if kept is None or kept[0] != span:
        kept = state[key] = span, compute()
    return kept[1]


def lookahead_positions(positions: Positions, keys: int) -> Positions:
    """Extend positions by padding to a number of keys, of which the last 32 are queries."""
    later = (0, keys - positions.src_len)
    padding = F.pad(~positions.real(), later, value=True)  # [B, keys]
    inspect = not positions.left_padded  # which is True, too, if padding must not be inspected
    ahead = Positions.from_padding(padding, min(STEPS, keys), inspect_padding=inspect)
    return ahead._replace(ends=F.pad(positions.ends, later))


def slice_for_step(terms: Terms, src_len: int, later: int) -> Terms:
    """Slice the terms of a step from those of many steps.

    Args:
        terms: computed for :func:`lookahead_positions`.
        src_len: S, the number of keys in this step.
        later: how many later steps the terms are for; the queries of these are the last ones.
    """

    def slice_term(term: Term) -> Term:
        if isinstance(term, ByDistance):
            return term.without_first_keys(later)  # the lowest distances
        term = term.map_axis("S", lambda x, dim: x.narrow(dim, 0, src_len))
        return term.map_axis("T", lambda x, dim: x.narrow(dim, x.size(dim) - 1 - later, 1))

    return Terms([slice_term(term) for term in terms.without(*BY_TOKEN)])
