"""Quantize attention to 16-bit integers, for the HTML page that shows it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fairseq_posenc.analysis.split import CapturedAttention
from fairseq_posenc.errors import UserError

FINE = 0.01  # largest step
LEVELS = 254  # minimum number of steps of a matrix
_MOST = 65_000  # maximum, so that a code fits two bytes


class Plane(NamedTuple):
    """One number of each pair of tokens, in every layer and head of a kind of attention."""

    name: str  # `weight`, a part of the score, or what a part comes from
    # `weight`, `part` (a summand of the score), `detail` (a summand of `both`), or `factor` (of
    # the score, where that is a product)
    role: str
    values: Tensor  # `[L, H, T, S]`


class Quantized(NamedTuple):
    """A plane in whole numbers: code c > 0 stands for ``(first + c - 1) * step``."""

    codes: Tensor  # `[L, H, T, S]` of int64, below 2^16; 0 where a query does not see the key
    step: list[list[float]]  # `[L][H]`, one for each matrix
    first: list[list[int]]  # `[L][H]`, each matrix's smallest number
    last: list[list[int]]  # `[L][H]`, each matrix's largest number

    def tobytes(self) -> bytes:
        """Concatenate the codes' low bytes and then their high ones, which compress well."""
        parts = self.codes % 256, self.codes // 256
        return b"".join(part.to(torch.uint8).numpy().tobytes() for part in parts)


def group_by_kind(seen: Sequence[CapturedAttention]) -> dict[str, list[CapturedAttention]]:
    """Group layers by the kind of attention: ``encoder``, ``decoder``, ``cross``."""
    by_kind: dict[str, list[CapturedAttention]] = {}
    for attention in seen:
        by_kind.setdefault("cross" if attention.cross else attention.stack, []).append(attention)
    return by_kind


def list_planes(layers: Sequence[CapturedAttention]) -> Iterator[Plane]:
    """Yield the weights of one kind of attention, and the parts of its scores."""
    yield Plane("weight", "weight", torch.cat([layer.weights for layer in layers]).double())
    splits = [layer.split for layer in layers]
    for part in ("content", "position", "both"):
        yield Plane(part, "part", torch.cat([getattr(split, part) for split in splits]))
    names = list(splits[0].details)
    if len(names) > 1:  # one alone is "both" itself
        role, suffix = ("factor", " factor") if splits[0].product else ("detail", "")
        for name in names:
            values = torch.cat([split.details[name] for split in splits])
            yield Plane(name.replace("_", " ") + suffix, role, values)


def find_visible(layers: Sequence[CapturedAttention]) -> Tensor:
    """Find which keys the queries of each layer may see, ``[L, 1, T, S]``.

    Keys on a side of the diagonal where no head has any weight are hidden, all others visible.
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


def quantize(values: Tensor, seen: Tensor) -> Quantized:
    """Round values ``[L, H, T, S]`` to multiples of a step, chosen for each matrix."""
    low = values.masked_fill(~seen, torch.inf).amin((2, 3), keepdim=True)
    high = values.masked_fill(~seen, -torch.inf).amax((2, 3), keepdim=True)
    step = ((high - low) / LEVELS).clamp(max=FINE).maximum((high - low) / _MOST)
    step = torch.where(high == low, FINE, step)
    codes = (values / step).round().long()
    first, last = ((end / step).round().long() for end in (low, high))
    codes = (codes - first + 1).masked_fill(~seen, 0)
    return Quantized(codes, *(x[..., 0, 0].tolist() for x in (step, first, last)))


def refuse_infinite(path: Path, kind: str, plane: Plane) -> None:
    """Refuse attention that is NaN or infinite, which huge finite weights can cause.

    Raises:
        UserError: names the first layer.
    """
    for number, layer in enumerate(plane.values, start=1):
        if not layer.isfinite().all():
            raise UserError(
                f"{path}: attention that is NaN or infinite ({kind}, layer {number}, "
                f"{plane.name}); the training diverged"
            )
