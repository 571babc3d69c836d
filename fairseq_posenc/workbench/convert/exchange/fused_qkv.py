"""Queries, keys and values in one matrix, as some classes of transformers have them.

Its rows are those of a head's query, key and value, head after head: ``(H, 3, D)`` times C.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

_PARTS = "qkv"
_JOINED = "query_key_value"
_PART = re.compile(rf"(.+\.{_JOINED})\.([{_PARTS}])\.(\w+)")


def joined(weights: dict[str, Tensor], heads: int) -> dict[str, Tensor]:
    """Return weights with the parts ``query_key_value.q``, ``.k``, ``.v`` as one tensor.

    Args:
        weights: by name.
        heads: H.
    """
    found: dict[str, Tensor] = {}
    for name, weight in weights.items():
        match = _PART.fullmatch(name)
        if match is None:
            found[name] = weight
        elif match[2] == _PARTS[0]:
            parts = [weights[f"{match[1]}.{part}.{match[3]}"] for part in _PARTS]
            rows = torch.stack([each.unflatten(0, (heads, -1)) for each in parts], dim=1)
            found[f"{match[1]}.{match[3]}"] = rows.flatten(0, 2)
    return found


def separated(weights: dict[str, Tensor], heads: int) -> dict[str, Tensor]:
    """Return weights with each such tensor as its parts.

    Args:
        weights: by name.
        heads: H.
    """
    found: dict[str, Tensor] = {}
    for name, weight in weights.items():
        stem, _, kind = name.rpartition(".")
        if not stem.endswith(f".{_JOINED}") or weight.size(0) % (3 * heads):
            found[name] = weight
            continue
        parts = weight.unflatten(0, (heads, 3, -1)).unbind(1)
        found |= {f"{stem}.{part}.{kind}": rows.flatten(0, 1) for part, rows in zip(_PARTS, parts)}
    return found
