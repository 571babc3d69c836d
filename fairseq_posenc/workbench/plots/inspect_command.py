"""``fairseq-posenc inspect``: the attention of one or two models as one HTML file."""

from __future__ import annotations

import argparse
import base64
import json
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fairseq_posenc.errors import UserError
from fairseq_posenc.files import refuse_bad_place, write_whole
from fairseq_posenc.transformer.capture_attention import capture_attention
from fairseq_posenc.version import __version__
from fairseq_posenc.workbench.loading.open_model import OpenModel, open_model
from fairseq_posenc.workbench.plots import quantize
from fairseq_posenc.workbench.plots.model_inputs import Reading, read_text
from fairseq_posenc.workbench.results.record import own_command
from fairseq_posenc.workbench.running.files import checksum
from fairseq_posenc.workbench.running.options import add_data
from fairseq_posenc.workbench.running.progress import say

TEMPLATE = Path(__file__).with_name("inspect.html")
_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")
_LARGEST = 64e6  # bytes of codes that a browser still opens quickly
# Per pair of tokens, with most encodings: four planes (a weight and three parts of its score, each
# in all layers and heads) of codes of two bytes.
_BYTES = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = parser.add_argument
    text = "a masked LM, causal LM or translation model, also fairseq's own; give it twice for two "
    text += "models side by side"
    add("--checkpoint", type=Path, action="append", required=True, metavar="FILE", help=text)
    add("--text", required=True, help="text to read; the source of a translation")
    add("--target", metavar="TEXT", help="the translation (default: the model's own)")
    text = "directory with dictionaries and tokenizer (default: that of each model's training)"
    add_data(parser, text)
    default = Path("attention.html")
    add("--out", type=Path, default=default, metavar="FILE", help="(default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Write the page; return the exit code."""
    if len(args.checkpoint) > 2:
        raise UserError(f"--checkpoint is given {len(args.checkpoint)} times: name one, or two")
    refuse_bad_place(args.out, "--out")
    inspections = []
    for path in args.checkpoint:
        opened = open_model(path, args.data)
        inspections.append(inspect_model(opened, read_text(opened, args.text, args.target)))
    text = render_page(inspections, own_command())
    write_whole(args.out, text)
    shapes = [
        ", ".join(
            f"{kind['name']} {kind['layers']} layers x {kind['heads']} heads x "
            f"{len(kind['queries'])}x{len(kind['keys'])} tokens"
            for kind in inspection.facts["kinds"]
        )
        for inspection in inspections
    ]
    say(f"{args.out}: {len(text) / 1e6:.2f} MB, {' and '.join(shapes)}")
    return 0


class Inspection(NamedTuple):
    """The attention of a model for one text."""

    facts: dict[str, Any]  # facts on the page: file, family, positions, and kinds of attention
    codes: bytes  # the quantized planes, concatenated


def inspect_model(opened: OpenModel, reading: Reading) -> Inspection:
    """Run a model on a text, and collect its quantized attention.

    Raises:
        UserError: the page would be too large, the text is too long for the model, or its
            attention is NaN or infinite.
    """
    _refuse_large(opened, reading)
    kinds, codes = [], bytearray()
    captured = capture_attention(opened.model, reading.run)
    for kind, layers in quantize.group_by_kind(captured).items():
        planes = []
        seen = quantize.find_visible(layers)
        for plane in quantize.list_planes(layers):
            quantize.refuse_infinite(opened.path, kind, plane)
            coded = quantize.quantize(plane.values, seen)
            # How the page turns codes into numbers again.
            scale = {"step": coded.step, "first": coded.first, "last": coded.last}
            planes.append({"name": plane.name, "role": plane.role, "start": len(codes), **scale})
            codes += coded.tobytes()
        kinds.append(
            {
                "name": kind,
                "layers": len(layers),
                "heads": layers[0].weights.size(1),
                "queries": reading.labels["encoder" if kind == "encoder" else "decoder"],
                "keys": reading.labels["decoder" if kind == "decoder" else "encoder"],
                "planes": planes,
            }
        )
    facts = {
        "path": str(opened.path),
        "sha256": checksum(opened.path),
        "family": opened.family.title,
        "positions": opened.positions,
        "kinds": kinds,
    }
    return Inspection(facts, bytes(codes))


def render_page(inspections: Sequence[Inspection], command: str) -> str:
    """Fill the template with one model, or two side by side; ``command`` is printed on the page."""
    models, codes = [], b""
    for inspection in inspections:
        models.append({**inspection.facts, "start": len(codes)})
        codes += inspection.codes
    data = {"command": command, "version": __version__, "models": models}
    filled = {
        # "<" could end the script element that holds the data.
        "data": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
        "codes": base64.b64encode(zlib.compress(codes)).decode(),
    }
    return _PLACEHOLDER.sub(lambda match: filled[match[1]], TEMPLATE.read_text(encoding="utf-8"))


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
