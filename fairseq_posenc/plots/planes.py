"""Attention as planes of bytes, for a page that shows it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fairseq_posenc.errors import UserError
from fairseq_posenc.transformer.watching import Attention

LEVELS = 254  # steps between the smallest and the largest value of a matrix; code 0 is "not seen"


class Plane(NamedTuple):
    """One number of each pair of tokens, in every layer and head of a kind of attention.

    Attributes:
        name: ``weight``, a part of the score, or what a part comes from.
        role: ``weight``, ``part`` (a summand of the score), ``detail`` (a summand of ``both``), or
            ``factor`` (of the score, where that is a product).
        values: ``[L, H, T, S]``.
    """

    name: str
    role: str
    values: Tensor


class Quantised(NamedTuple):
    """A plane in bytes: code c > 0 stands for ``low + (c - 1) / 254 * (high - low)``.

    Attributes:
        codes: ``[L, H, T, S]`` of uint8; 0 where a query does not see the key.
        low: ``[L][H]``, the smallest value of each matrix.
        high: the largest.
    """

    codes: Tensor
    low: list[list[float]]
    high: list[list[float]]


def by_kind(seen: Sequence[Attention]) -> dict[str, list[Attention]]:
    """Return the layers of each kind of attention: ``encoder``, ``decoder``, ``cross``."""
    found: dict[str, list[Attention]] = {}
    for attention in seen:
        found.setdefault("cross" if attention.cross else attention.stack, []).append(attention)
    return found


def planes(layers: Sequence[Attention]) -> Iterator[Plane]:
    """Yield what is known of one kind of attention; the split where there is one."""
    yield Plane("weight", "weight", torch.cat([each.weights for each in layers]).double())
    splits = [each.split for each in layers if each.split is not None]
    if not splits:
        return
    for part in ("content", "position", "both"):
        yield Plane(part, "part", torch.cat([getattr(split, part) for split in splits]))
    names = list(splits[0].details)
    if len(names) > 1:  # one alone is "both" itself
        role, suffix = ("factor", " factor") if splits[0].product else ("detail", "")
        for name in names:
            values = torch.cat([split.details[name] for split in splits])
            yield Plane(name.replace("_", " ") + suffix, role, values)


def visible(layers: Sequence[Attention]) -> Tensor:
    """Return which keys the queries of each layer may see, ``[L, 1, T, S]``.

    All of them, or none after the query, or none before it: a side of the diagonal on which no
    head has any weight.
    """
    seen = []
    for layer in layers:
        total = layer.weights.sum(1, keepdim=True)
        allowed = torch.ones_like(total, dtype=torch.bool)
        if not total.triu(1).any():
            allowed = allowed.tril()
        if not total.tril(-1).any():
            allowed = allowed.triu()
        seen.append(allowed)
    return torch.cat(seen)


def quantised(values: Tensor, seen: Tensor) -> Quantised:
    """Return values ``[L, H, T, S]`` in bytes, with a scale of its own for each matrix."""
    low = values.masked_fill(~seen, torch.inf).amin((2, 3), keepdim=True)
    high = values.masked_fill(~seen, -torch.inf).amax((2, 3), keepdim=True)
    step = ((high - low) / LEVELS).masked_fill(high == low, 1.0)
    codes = ((values - low) / step).round().clamp(0, LEVELS) + 1
    return Quantised(codes.masked_fill(~seen, 0).to(torch.uint8), _ends(low), _ends(high))


def refuse_infinite(path: Path, kind: str, plane: Plane) -> None:
    """Refuse attention that is no number, as of weights that are finite but huge.

    Raises:
        UserError: names the first layer.
    """
    finite = plane.values.isfinite().all(-1).all(-1).all(-1)  # [L]
    if not finite.all():
        layer = int((~finite).nonzero()[0])
        raise UserError(
            f"{path}: attention that is NaN or infinite ({kind}, layer {layer}, {plane.name}); "
            "the training diverged"
        )


def _ends(values: Tensor) -> list[list[float]]:
    ends: list[list[float]] = [
        [float(f"{value:.6g}") for value in row] for row in values[..., 0, 0].tolist()
    ]
    return ends
