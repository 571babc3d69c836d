"""The attention of one or two models as one HTML file, which needs nothing else to be seen."""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fairseq_posenc.errors import UserError
from fairseq_posenc.transformer.capture_attention import CapturedAttention, capture_attention
from fairseq_posenc.version import __version__
from fairseq_posenc.workbench.loading.open_model import OpenModel
from fairseq_posenc.workbench.plots import quantize
from fairseq_posenc.workbench.plots.model_inputs import Reading
from fairseq_posenc.workbench.running.files import checksum

TEMPLATE = Path(__file__).with_name("inspect.html")
_PLACE = re.compile(r"\{\{(\w+)\}\}")  # of what the template takes
_LARGEST = 64e6  # bytes of codes that a browser still opens gladly
_BYTES = 8  # of a pair of tokens, with most encodings: its weight, and three parts of its score


class Watched(NamedTuple):
    """What a model did with a text."""

    facts: dict[str, Any]  # what the page says of it, as JSON values
    codes: bytes  # the bytes of its planes, one after the other


def inspect(opened: OpenModel, reading: Reading) -> Watched:
    """Let a model read, and collect what its attention did.

    Raises:
        UserError: the page would be too large, the text is too long for the model, or its
            attention is no number.
    """
    _refuse_large(opened, reading)
    kinds, codes = [], bytearray()
    for kind, layers in quantize.group_by_kind(
        capture_attention(opened.model, reading.run)
    ).items():
        found = []
        seen = quantize.visible(layers)
        for plane in quantize.planes(layers):
            quantize.refuse_infinite(opened.path, kind, plane)
            coded = quantize.quantised(plane.values, seen)
            scale = {"step": coded.step, "first": coded.first, "last": coded.last}
            found.append({"name": plane.name, "role": plane.role, "start": len(codes), **scale})
            codes += coded.tobytes()
        kinds.append({**_kind(kind, layers, reading), "planes": found})
    facts = {
        "path": str(opened.path),
        "sha256": checksum(opened.path),
        "family": opened.family.title,
        "positions": opened.positions,
        "kinds": kinds,
    }
    return Watched(facts, bytes(codes))


def page(watched: Sequence[Watched], command: str) -> str:
    """Fill the template with one model, or with two to see side by side; ``command`` made it."""
    starts = [sum(len(each.codes) for each in watched[:i]) for i in range(len(watched))]
    data = {
        "command": command,
        "version": __version__,
        "models": [{**each.facts, "start": start} for each, start in zip(watched, starts)],
    }
    codes = zlib.compress(b"".join(each.codes for each in watched))
    filled = {
        # In a script element, nothing may look like its end.
        "data": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
        "codes": base64.b64encode(codes).decode(),
    }
    return _PLACE.sub(lambda place: filled[place[1]], TEMPLATE.read_text(encoding="utf-8"))


def _kind(kind: str, layers: Sequence[CapturedAttention], reading: Reading) -> dict[str, Any]:
    return {
        "name": kind,
        "layers": len(layers),
        "heads": layers[0].weights.size(1),
        "queries": reading.labels["encoder" if kind == "encoder" else "decoder"],
        "keys": reading.labels["decoder" if kind == "decoder" else "encoder"],
    }


def _refuse_large(opened: OpenModel, reading: Reading) -> None:
    heads = sum(
        len(stack.layers) * stack.layers[0].self_attn.num_heads for stack in opened.stacks.values()
    )
    longest = max(map(len, reading.labels.values()))
    if heads * longest**2 * _BYTES > _LARGEST:
        fits = int((_LARGEST / _BYTES / heads) ** 0.5)
        raise UserError(
            f"{opened.path}: {longest} tokens in {heads} heads are too many for one page; give a "
            f"text of at most {fits} tokens"
        )
