"""Quantizes the attention of models to 16-bit integers, and fills the HTML page of ``inspect``.

L layers, H heads, T queries, S keys.
"""

import base64
import json
import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairseq_posenc.analysis.split import CapturedAttention
from fairseq_posenc.errors import UserError, counted
from fairseq_posenc.version import __version__
from fairseq_posenc.workbench.results.record import group_by

# The stacks of the queries and of the keys, by kind of attention.
STACKS = {
    "encoder": ("encoder", "encoder"),
    "decoder": ("decoder", "decoder"),
    "cross": ("decoder", "encoder"),
}
MOST_TOKENS = 1024  # of a text: each head has figures for all pairs of them
MOST_PAIRS = 2**27  # of a stack's self-attention, in all heads; captured ones take about 40 bytes
MOST_SHOWN = 2**26  # of a page, in all its models; these take about 125 bytes
TEMPLATE = Path(__file__).with_name("inspect.html")
# A matrix has at least `MIN_STEPS` steps between its smallest and its largest value, each at most
# `LARGEST_STEP`; but larger steps if there would be more than `_MAX_STEPS`.
LARGEST_STEP = 0.01
MIN_STEPS = 254  # codes 1 to 255
_MAX_STEPS = 65_000  # so that a code fits into two bytes


class TextAttention(NamedTuple):
    """The attention of a model to one text."""

    path: Path  # checkpoint or folder of the model
    sha256: str  # checksum of its weights
    family: str  # name of its family or class
    positions: dict[str, str | None]  # spec of each stack; None for fairseq's own positions
    labels: dict[str, list[str]]  # text of each token, by stack
    captured: list[CapturedAttention]  # weights and split scores of each layer, `(1, H, T, S)`

    def group_by_kind(self) -> dict[str, list[CapturedAttention]]:
        """Group the layers by the kind of attention, a key of :data:`STACKS`."""
        return group_by(self.captured, lambda layer: "cross" if layer.cross else layer.stack)


def refuse_long_text(reader: str, length: int, limit: int | None, heads: int) -> None:
    """Refuse a text longer than its reader's limit, if any, or than its stack's heads allow."""
    most = min(limit or MOST_TOKENS, MOST_TOKENS, math.isqrt(MOST_PAIRS // heads))
    if length > most:
        who = reader if most == limit else f"a picture or page of {counted(heads, 'heads')}"
        raise UserError(f"{who} reads {most} tokens, and the text has {length}; shorten it")


def render_page(models: Sequence[TextAttention], command: str) -> str:
    """Fill the page's template with one or two models, and the command that made the page.

    Raises:
        UserError: attention that is NaN or infinite, or too much for a page.
    """
    if (pairs := sum(x.weights.numel() for model in models for x in model.captured)) > MOST_SHOWN:
        raise UserError(f"a page takes {MOST_SHOWN:,} weights, not {pairs:,}; shorten the text")
    described, packed = [], b""
    for model in models:
        facts, packed_model = _describe_model(model)
        described.append({**facts, "start": len(packed)})  # where its bytes begin
        packed += packed_model
    data = {"command": command, "version": __version__, "models": described}
    page = TEMPLATE.read_text(encoding="utf-8")
    page = page.replace("{{codes}}", base64.b64encode(zlib.compress(packed)).decode())
    # "<" could end the script element around the data.
    return page.replace("{{data}}", json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"))


def _describe_model(model: TextAttention) -> tuple[dict[str, Any], bytes]:
    """Return what the page's script reads of a model, and its quantized planes as bytes."""
    kinds = []
    packed = bytearray()
    for kind, layers in model.group_by_kind().items():
        weights = torch.cat([layer.weights for layer in layers])  # [L, H, T, S]: a batch of one
        visible = find_visible(weights)  # [L, 1, T, S]
        planes: list[dict[str, Any]] = []
        for (name, role), values in _collect_planes(layers).items():
            if broken := [n for n, layer in enumerate(values, 1) if not layer.isfinite().all()]:
                where = f"({kind}, layer {broken[0]}, {name}); the model's training diverged"
                raise UserError(f"{model.path}: attention that is NaN or infinite {where}")
            coded = quantize(values, visible)
            # From these the page computes the values from their codes.
            scale = {"step": coded.step, "first": coded.first, "last": coded.last}
            planes.append({"name": name, "role": role, "start": len(packed), **scale})
            # All low bytes, then all high bytes, compress well.
            for part in coded.codes % 256, coded.codes // 256:
                packed += part.to(torch.uint8).numpy().tobytes()
        queries, keys = STACKS[kind]
        shown = find_telling_head(weights)  # indices of the layer and the head
        sizes = {"layers": len(layers), "heads": weights.size(1)}
        labels = {"queries": model.labels[queries], "keys": model.labels[keys]}
        kinds.append({"name": kind, "shown": shown, **sizes, **labels, "planes": planes})
    facts = {"path": str(model.path), "sha256": model.sha256, "family": model.family}
    return {**facts, "positions": model.positions, "kinds": kinds}, bytes(packed)


def _collect_planes(layers: Sequence[CapturedAttention]) -> dict[tuple[str, str], Tensor]:
    """Collect the planes of one kind of attention: values of all pairs of tokens, ``[L, H, T, S]``.

    The keys are the name of a plane and its role: ``weight``; ``part``, a summand of the score (of
    ``content`` alone, of ``position`` alone, and ``both``, the rest); ``detail``, a summand of
    ``both``. If the score is a product, ``factor`` is one of its factors, instead of details.
    """
    splits = [layer.split for layer in layers]
    # Each layer's are [1, H, T, S]: weights in the model's precision, all of a split in float64.
    planes = {("weight", "weight"): torch.cat([layer.weights.double() for layer in layers])}
    for part in ("content", "position", "both"):
        planes[part, "part"] = torch.cat([getattr(split, part) for split in splits])
    names = list(dict.fromkeys(name for split in splits for name in split.details))
    # A single one equals "both": products have more. All layers must have summands, or factors.
    if len(names) > 1 and len({split.product for split in splits}) == 1:
        are_factors = splits[0].product  # whether its details are factors
        role, suffix = ("factor", " factor") if are_factors else ("detail", "")
        absent = torch.full_like(splits[0].both, float(are_factors))  # 1 or 0: no change
        for name in names:
            values = [split.details.get(name, absent) for split in splits]
            planes[name.replace("_", " ") + suffix, role] = torch.cat(values)
    return planes


def find_telling_head(weights: Tensor) -> list[int]:
    """Find the layer and the head to show first: the one whose rows ``[L, H, T, S]`` differ most.

    It has the largest mutual information of query and key, if all queries are equally likely; 0 if
    all rows are alike.
    """
    mean = weights.mean(2, keepdim=True)
    information = (weights.xlogy(weights) - weights.xlogy(mean)).sum((2, 3))  # [L, H], times T
    return list(divmod(int(information.argmax()), information.size(1)))


def find_visible(weights: Tensor) -> Tensor:
    """Find which keys the queries of each layer can see, ``[L, 1, T, S]``, from ``[L, H, T, S]``.

    Masks are not captured, so this is derived from the weights: the keys on one side of the
    diagonal are hidden if no head gives any of them weight; all others are visible.
    """
    total = weights.sum(1, keepdim=True)
    everything = torch.ones_like(total, dtype=torch.bool)
    sees_later = total.triu(1).any((1, 2, 3), keepdim=True)  # [L, 1, 1, 1]
    sees_earlier = total.tril(-1).any((1, 2, 3), keepdim=True)
    return (everything.tril() | sees_later) & (everything.triu() | sees_earlier)


class Quantized(NamedTuple):
    """A plane as integers: code c > 0 means the value ``(first + c - 1) * step``."""

    codes: Tensor  # `[L, H, T, S]` of int64, below 2^16; 0 if the query cannot see the key
    step: list[list[float]]  # `[L][H]`, step of each matrix
    first: list[list[int]]  # `[L][H]`, smallest value of each matrix, in steps
    last: list[list[int]]  # `[L][H]`, largest value of each matrix, in steps


def quantize(values: Tensor, visible: Tensor) -> Quantized:
    """Round values ``[L, H, T, S]`` to multiples of a step that is chosen for each matrix."""
    low = values.masked_fill(~visible, torch.inf).amin((2, 3), keepdim=True)
    high = values.masked_fill(~visible, -torch.inf).amax((2, 3), keepdim=True)
    extent = high - low
    step = (extent / MIN_STEPS).clamp(max=LARGEST_STEP).maximum(extent / _MAX_STEPS)
    step = torch.where(extent == 0, LARGEST_STEP, step)  # any but 0: all values are equal
    codes = (values / step).round().long()
    first = (low / step).round().long()
    last = (high / step).round().long()
    codes = (codes - first + 1).masked_fill(~visible, 0)  # 0 is left for hidden keys
    return Quantized(codes, *(x[..., 0, 0].tolist() for x in (step, first, last)))
