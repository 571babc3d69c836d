"""Terms of a generation: computed for many steps at once, and cut to size at each.

A step has one key more than the one before, so by distance it needs the rows of that, and one more.
What is kept lives in fairseq's incremental state, with the keys and values of the generation, and
goes with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fairseq_posenc.encodings.base import Terms
from fairseq_posenc.positions import Span

STEPS = 32  # rows are computed for a multiple of so many keys


def span_of_step(src_len: int, device: torch.device) -> Span:
    """Return the distances from a last query to ``src_len`` keys, and room for steps to come."""
    return Span.of(1, -(-src_len // STEPS) * STEPS, device)


def kept(state: Any, key: str, span: Span, compute: Callable[[Span], Terms]) -> Terms:
    """Return the terms of a span, computed when a generation first asks for it.

    Args:
        state: fairseq's incremental state.
        key: of the terms in it.
        span: see :func:`span_of_step`.
        compute: gives them.
    """
    if key not in state or state[key][0] != span:
        state[key] = span, compute(span)
    terms: Terms = state[key][1]
    return terms


def latest(terms: Terms, src_len: int) -> Terms:
    """Return the rows of a step's keys, the last ``src_len`` of each table by distance."""
    rows: dict[str, Any] = {
        name: table[:, table.size(1) - src_len :]
        for name, table in terms._asdict().items()
        if isinstance(table, Tensor) and name not in ("content_rows", "pair_bias", "first")
    }
    return terms._replace(**rows)
