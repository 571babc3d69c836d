"""Quantizes attention to 16-bit integers, for the HTML page of ``inspect``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fairseq_posenc.analysis.split import CapturedAttention
from fairseq_posenc.errors import UserError

FINE = 0.01  # largest step
LEVELS = 254  # minimum number of steps between the smallest and the largest value of a matrix
_MOST = 65_000  # maximum number of steps, so that a code fits into two bytes


class Plane(NamedTuple):
    """A quantity of every pair of tokens, in all layers and heads of a kind of attention."""

    name: str  # `weight`, or the name of a part of the score
    # `weight`, `part` (a summand of the score), `detail` (a summand of the part `both`) or `factor`
    # (if the score is a product)
    role: str
    values: Tensor  # `[L, H, T, S]`


class Quantized(NamedTuple):
    """A plane as integers: code c > 0 stands for ``(first + c - 1) * step``."""

    codes: Tensor  # `[L, H, T, S]` of int64, below 2^16; 0 if the query cannot see the key
    step: list[list[float]]  # `[L][H]`, step of each matrix
    first: list[list[int]]  # `[L][H]`, smallest value of each matrix, in steps
    last: list[list[int]]  # `[L][H]`, largest value of each matrix, in steps

    def tobytes(self) -> bytes:
        """Concatenate all low bytes of the codes, then all high bytes, which compress well."""
        parts = self.codes % 256, self.codes // 256
        return b"".join(part.to(torch.uint8).numpy().tobytes() for part in parts)


def group_by_kind(captured: Sequence[CapturedAttention]) -> dict[str, list[CapturedAttention]]:
    """Group layers by the kind of attention: ``encoder``, ``decoder``, ``cross``."""
    by_kind: dict[str, list[CapturedAttention]] = {}
    for attention in captured:
        by_kind.setdefault("cross" if attention.cross else attention.stack, []).append(attention)
    return by_kind


def list_planes(layers: Sequence[CapturedAttention]) -> Iterator[Plane]:
    """Yield the weights of one kind of attention, and the parts of its scores."""
    yield Plane("weight", "weight", torch.cat([layer.weights for layer in layers]).double())
    splits = [layer.split for layer in layers]
    for part in ("content", "position", "both"):
        yield Plane(part, "part", torch.cat([getattr(split, part) for split in splits]))
    names = list(splits[0].details)
    if len(names) > 1:  # a single one equals the part "both"
        role, suffix = ("factor", " factor") if splits[0].product else ("detail", "")
        for name in names:
            values = torch.cat([split.details[name] for split in splits])
            yield Plane(name.replace("_", " ") + suffix, role, values)


def find_visible(layers: Sequence[CapturedAttention]) -> Tensor:
    """Find which keys the queries of each layer can see, ``[L, 1, T, S]``.

    All keys on one side of the diagonal are hidden if no head gives any of them weight; all other
    keys are visible.
    """
    visible = []
    for layer in layers:
        total = layer.weights.sum(1, keepdim=True)
        allowed = torch.ones_like(total, dtype=torch.bool)
        if not total.triu(1).any():
            allowed = allowed.tril()
        if not total.tril(-1).any():
            allowed = allowed.triu()
        visible.append(allowed)
    return torch.cat(visible)


def quantize(values: Tensor, visible: Tensor) -> Quantized:
    """Round values ``[L, H, T, S]`` to multiples of a step that is chosen for each matrix."""
    low = values.masked_fill(~visible, torch.inf).amin((2, 3), keepdim=True)
    high = values.masked_fill(~visible, -torch.inf).amax((2, 3), keepdim=True)
    step = ((high - low) / LEVELS).clamp(max=FINE).maximum((high - low) / _MOST)
    step = torch.where(high == low, FINE, step)
    codes = (values / step).round().long()
    first, last = ((end / step).round().long() for end in (low, high))
    codes = (codes - first + 1).masked_fill(~visible, 0)
    return Quantized(codes, *(x[..., 0, 0].tolist() for x in (step, first, last)))


def refuse_infinite(path: Path, kind: str, plane: Plane) -> None:
    """Refuse attention that is NaN or infinite, which very large weights can cause.

    Raises:
        UserError: the plane has such values; the message names the first layer with one.
    """
    for number, layer in enumerate(plane.values, start=1):
        if not layer.isfinite().all():
            raise UserError(
                f"{path}: attention that is NaN or infinite ({kind}, layer {number}, "
                f"{plane.name}); the training diverged"
            )
