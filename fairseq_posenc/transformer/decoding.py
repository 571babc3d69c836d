"""Terms of a generation: computed for many steps at once, and sliced at each.

A step has one key more than the one before, so by distance it needs the rows of that, and one more.
A bias by pair is computed for the queries of the steps to come. What is kept lives in fairseq's
incremental state, with the keys and values of the generation, and goes with it.
"""

from collections.abc import Callable
from typing import Any

from torch.nn import functional as F

from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.positions import Positions, Span

STEPS = 32  # terms are computed for a multiple of so many keys


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


def slice_for_step(terms: Terms, src_len: int) -> Terms:
    """Slice the terms of a step with ``src_len`` keys from those of :func:`lookahead_positions`."""
    reset_rows = 0 if terms.first is None else 2  # at the end of each table
    sliced: dict[str, Any] = {}
    for name, term, tensor in terms.given():
        if term.rows is not None:
            rows = src_len + reset_rows
            # [..., R, ...] -> [..., src_len, ...]
            sliced[name] = tensor.narrow(term.rows, tensor.size(term.rows) - rows, rows)
        else:
            queries, keys = tensor.shape[2:]
            query = queries - 1 - (keys - src_len)
            sliced[name] = tensor[:, :, query : query + 1, :src_len]  # [B, H, 1, S]
    if terms.first is not None:
        sliced["first"] = terms.first[:, :src_len]  # [B, S]
    return terms._replace(**sliced)
