"""Recorded GPUs, terms and lengths for which a kernel of ours, or FlexAttention, is the fastest.

The planner takes it there, and nowhere else. A record is added with the figures that prove it:
``make gpu`` measures them, and ``docs/gpu.md`` says how.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fairseq_posenc.backends.base import CallFeatures
from fairseq_posenc.encodings.terms import Terms


class Record(NamedTuple):
    """One measurement that a backend won, forward and backward together.

    Attributes:
        backend: ``triton`` or ``flex``.
        chip: such as ``sm_90``.
        terms: fields of :class:`~fairseq_posenc.encodings.terms.Terms` that were on, by name, with
            ``product`` if they were multiplied. A reset needs records of its own (``first``).
        dropout: whether weights were dropped.
        shortest: the fewest keys for which it holds.
        longest: the most keys.
        source: the file with the figures, in ``docs/results``.
    """

    backend: str
    chip: str
    terms: frozenset[str]
    dropout: bool
    shortest: int
    longest: int
    source: str


RECORDED: tuple[Record, ...] = ()  # No GPU was at hand so far.


def chip() -> str:
    """Name the generation of the GPU in use."""
    if not torch.cuda.is_available():
        return "a GPU that is not here"
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def parts(terms: Terms) -> frozenset[str]:
    """List the names of the terms that are on."""
    on = {name for name, x in zip(terms._fields, terms) if isinstance(x, Tensor)}
    return frozenset(on | {"product"} if terms.product else on)


def winner(terms: Terms, call: CallFeatures, chip: str) -> tuple[str, str]:
    """Find the backend that a record names for a call, or an empty name; with the reason."""
    here = [record for record in RECORDED if record.chip == chip]
    if not here:
        return "", f"no recorded benchmark for {chip}"
    kind = parts(terms), call.dropout
    same = [record for record in here if (record.terms, record.dropout) == kind]
    if not same:
        return "", f"no recorded benchmark of such terms for {chip}"
    for record in same:
        if record.shortest <= call.src_len <= record.longest:
            return record.backend, f"the fastest in a benchmark on {chip}"
    return "", f"no recorded benchmark of such a length for {chip}"
