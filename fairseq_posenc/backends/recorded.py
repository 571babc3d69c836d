"""Benchmarks won by the Triton kernels or FlexAttention: GPUs, terms and lengths.

``auto`` chooses the two only where such a record exists. ``make gpu`` measures the figures for a
new one; see ``docs/gpu.md``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fairseq_posenc.backends.base import CallFeatures
from fairseq_posenc.encodings.terms import Terms


class BenchmarkRecord(NamedTuple):
    """A benchmark of forward and backward pass together, and the backend that won it."""

    backend: str  # `triton` or `flex`
    chip: str  # compute capability, such as `sm_90`
    # names of the fields of `Terms` that were given, and `product` if they were multiplied
    terms: frozenset[str]
    dropout: bool  # whether attention dropout was on
    shortest: int  # smallest number of keys for which the record holds
    longest: int  # largest number of keys
    source: str  # file with the figures, in `docs/results`


RECORDED: tuple[BenchmarkRecord, ...] = ()  # no GPU has been measured yet


def find_chip() -> str:
    """Find the compute capability of the GPU in use, such as ``sm_90``."""
    if not torch.cuda.is_available():
        return "a GPU that is not here"
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def list_terms(terms: Terms) -> frozenset[str]:
    """List the names of the terms that are given."""
    on = {name for name, x in zip(terms._fields, terms) if isinstance(x, Tensor)}
    return frozenset(on | {"product"} if terms.product else on)


def find_fastest(terms: Terms, call: CallFeatures, chip: str) -> tuple[str, str]:
    """Find the fastest recorded backend for a call, or "", and the reason."""
    here = [record for record in RECORDED if record.chip == chip]
    if not here:
        return "", f"no recorded benchmark for {chip}"
    kind = list_terms(terms), call.dropout
    same = [record for record in here if (record.terms, record.dropout) == kind]
    if not same:
        return "", f"no recorded benchmark of such terms for {chip}"
    for record in same:
        if record.shortest <= call.src_len <= record.longest:
            return record.backend, f"the fastest in a benchmark on {chip}"
    return "", f"no recorded benchmark of such a length for {chip}"
