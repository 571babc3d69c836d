"""Flash attention with tables by distance, forward and backward, as Triton kernels for a GPU.

Scores exist for one tile at a time, and memory grows linearly with the length. Serves what is
a matrix product or a number for each distance.
"""

from __future__ import annotations

import importlib.util
import os
import re
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from fairseq_posenc.backends.base import Call, Mask, scale_of
from fairseq_posenc.backends.triton.dropout import Dropout
from fairseq_posenc.encodings.base import Terms

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
WIDEST_HEAD = 128
OLDEST = (3, 3)  # versions before have no kernels that take a NamedTuple


def unavailable() -> str:
    """Return why this backend cannot run on this machine, or an empty string."""
    version = _version()
    if not version:
        return "triton is not installed"
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST:
        return f"triton is {version}, and {'.'.join(map(str, OLDEST))} is the oldest that will do"
    if _interpreted():
        return ""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    if torch.version.cuda and torch.cuda.get_device_capability() < (8, 0):
        return "the GPU is older than compute capability 8.0"
    return ""


def refuses(terms: Terms, call: Call) -> str:
    """Return why these kernels cannot compute such a call, or an empty string."""
    if call.need_weights:
        return "it does not keep the attention weights"
    if call.device != "cuda" and not _interpreted():
        return f"it runs on a GPU, not on {call.device}"
    if call.head_dim > WIDEST_HEAD:
        return f"its heads are at most {WIDEST_HEAD} wide, not {call.head_dim}"
    if call.dtype not in DTYPES:
        return f"it computes in float32 at most, not in {call.dtype}"
    if terms.channel_gain is not None:
        return "no matrix product computes a gain for each channel"
    if terms.pair_bias is not None:
        return "a bias for each pair of tokens is no function of their distance"
    if terms.content_rows is not None:
        return "the rows have not been projected yet"
    return ""


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    terms: Terms,
    mask: Mask,
    dropout: float = 0.0,
    need_weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """See :class:`~fairseq_posenc.backends.base.Backend`."""
    # Only here, for triton takes long to import and is not everywhere.
    from fairseq_posenc.backends.triton.attention import Attention, Settings
    from fairseq_posenc.backends.triton.resets import products

    apply = Attention.apply
    if torch.compiler.is_compiling():
        from fairseq_posenc.backends.triton.operation import attend as apply
    query, key = query.type_as(value), key.type_as(value)
    first = None if terms.first is None else terms.first.expand(query.size(0), -1)
    settings = Settings(
        first=_index(first),
        padding=_bytes(mask.key_padding),
        pairs=_bytes(mask.pairs),
        dropout=Dropout.of(dropout, query, key) if dropout else None,
        scale=scale_of(terms, query.size(-1)),
        direction=mask.direction,
        product=terms.product,
    )
    with torch.autocast(query.device.type, enabled=False):
        attended, value_sums = apply(
            settings,
            query,
            key,
            value,
            terms.query_table,
            terms.key_table,
            terms.value_table,
            terms.gain,
            terms.bias,
            None if first is None else products(query, terms.query_table),
            None if first is None else products(key, terms.key_table),
        )
        if first is not None and terms.value_table is not None:
            rows = terms.value_table[:, -2:].float()
            attended = attended + (value_sums @ rows).type_as(attended)
    return attended, None


def _index(first: Tensor | None) -> Tensor | None:
    """Return which token of each row is marked, ``(B,)`` of int32; -T where none is."""
    if first is None:
        return None
    return torch.where(first.any(1), first.int().argmax(1), -first.size(1)).int()


def _version() -> str:
    """Return Triton's version, or an empty string."""
    spec = importlib.util.find_spec("triton")
    return "" if spec is None or spec.origin is None else _version_in(spec.origin)


@cache
def _version_in(path: str) -> str:
    """Return the version that a file names: importing it takes long, and it has several names."""
    found = re.search(r"__version__ = [\"']([^\"']+)", Path(path).read_text("utf-8"))
    return found[1] if found else ""


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _bytes(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.contiguous().view(torch.uint8)
