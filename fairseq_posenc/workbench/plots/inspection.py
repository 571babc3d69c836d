"""Quantizes the attention of a model to a text, and fills it into the HTML page of ``inspect``."""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fairseq_posenc.analysis.split import CapturedAttention
from fairseq_posenc.errors import UserError
from fairseq_posenc.version import __version__
from fairseq_posenc.workbench.plots import quantize

TEMPLATE = Path(__file__).with_name("inspect.html")
_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")
_LARGEST = 64e6  # bytes of codes that a browser still opens quickly
# For a pair of tokens in a head: most encodings have four planes (the weight and three parts of the
# score), with a code of two bytes in each.
_BYTES = 8


class Facts(NamedTuple):
    """Facts about a model that the page shows."""

    path: Path  # its checkpoint or folder
    sha256: str  # checksum of its weights
    family: str
    positions: dict[str, str | None]  # spec of each stack; None for fairseq's own positions


class Inspection(NamedTuple):
    """The attention of a model to one text."""

    facts: dict[str, Any]  # fields of `Facts`, and the kinds of attention with their planes
    codes: bytes  # the quantized planes, concatenated

    @classmethod
    def build(
        cls, facts: Facts, captured: Sequence[CapturedAttention], labels: dict[str, list[str]]
    ) -> Inspection:
        """Quantize captured attention.

        Args:
            facts: facts about the model.
            captured: attention of all layers.
            labels: text of each token, by stack: ``encoder``, ``decoder``.

        Raises:
            UserError: attention that is NaN or infinite.
        """
        kinds, codes = [], bytearray()
        for kind, layers in quantize.group_by_kind(captured).items():
            planes = []
            visible = quantize.find_visible(layers)
            for plane in quantize.list_planes(layers):
                quantize.refuse_infinite(facts.path, kind, plane)
                coded = quantize.quantize(plane.values, visible)
                # From these the page computes the numbers that the codes stand for.
                scale = {"step": coded.step, "first": coded.first, "last": coded.last}
                planes.append(
                    {"name": plane.name, "role": plane.role, "start": len(codes), **scale}
                )
                codes += coded.tobytes()
            kinds.append(
                {
                    "name": kind,
                    "layers": len(layers),
                    "heads": layers[0].weights.size(1),
                    "queries": labels["encoder" if kind == "encoder" else "decoder"],
                    "keys": labels["decoder" if kind == "decoder" else "encoder"],
                    "planes": planes,
                }
            )
        shown = {**facts._asdict(), "path": str(facts.path), "kinds": kinds}
        return cls(shown, bytes(codes))


def refuse_large(path: Path, heads: int, labels: dict[str, list[str]]) -> None:
    """Refuse a page that would be too large; ``heads`` counts the heads of all layers."""
    longest = max(map(len, labels.values()))
    if heads * longest**2 * _BYTES > _LARGEST:
        limit = int((_LARGEST / _BYTES / heads) ** 0.5)
        raise UserError(
            f"{path}: {longest} tokens in {heads} heads are too many for one page; give a text of "
            f"at most {limit} tokens"
        )


def render_page(inspections: Sequence[Inspection], command: str) -> str:
    """Fill the page's template with one or two models, and the command that made the page."""
    models, codes = [], b""
    for inspection in inspections:
        models.append({**inspection.facts, "start": len(codes)})
        codes += inspection.codes
    data = {"command": command, "version": __version__, "models": models}
    filled = {
        # "<" could end the script element around the data.
        "data": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
        "codes": base64.b64encode(zlib.compress(codes)).decode(),
    }
    return _PLACEHOLDER.sub(lambda match: filled[match[1]], TEMPLATE.read_text(encoding="utf-8"))
