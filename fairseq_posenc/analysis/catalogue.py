"""The catalogue of encodings: sections of docstrings, costs and numbers of parameters."""

import argparse
import inspect
import json
import re
from typing import Any, NamedTuple

from fairseq_posenc import registry, specs
from fairseq_posenc.analysis import costs
from fairseq_posenc.assembly import Assembly
from fairseq_posenc.encodings.base import Dims
from fairseq_posenc.errors import UserError
from fairseq_posenc.models.decbert import DECBERT

HEADINGS = ("Equation", "Shapes", "Parameters", "Source", "Differs")
BASE = Dims(embed_dim=768, num_heads=12, max_positions=512)  # RoBERTa-base
BASE_LAYERS = 12
_DECBERT = """{name}: an architecture, not an encoding: `learned` positions, and two first layers
that look one way each (DecBERT, Luo et al. 2022, arXiv:2204.08688)

In fairseq-train  --arch {name}
The same          --position-encoding learned --attention-directions {directions}
The encoding      fairseq-posenc describe learned"""


class Page(NamedTuple):
    """The sections of an encoding's docstring."""

    summary: str
    equation: str
    shapes: str
    parameters: str
    source: str
    differs: str


def parse_page(name: str) -> Page:
    """Parse the sections of an encoding's docstring.

    Raises:
        ValueError: a section is missing.
    """
    text = inspect.getdoc(registry.get(name)) or ""
    parts = re.split(rf"^({'|'.join(HEADINGS)}):$", text, flags=re.MULTILINE)
    sections = dict(zip(parts[1::2], parts[2::2]))
    missing = [heading for heading in HEADINGS if not sections.get(heading, "").strip()]
    if missing:
        raise ValueError(f"the docstring of {name} lacks {', '.join(missing)}")
    return Page(_join_lines(parts[0]), *(_join_lines(sections[heading]) for heading in HEADINGS))


def name_families(spec: str) -> str:
    """Name the stacks that a spec works in: decoders, or encoders and decoders."""
    causal = any(registry.get(item.name).causal_only for item in specs.parse(spec).items)
    return "decoders" if causal else "encoders and decoders"


def count_parameters(spec: specs.Spec, dims: Dims, layers: int) -> int:
    """Count the position parameters of a stack, from real modules."""
    return sum(Assembly(spec, dims).parameters(layers).values())


def count_at_base_size(name: str) -> int:
    """Count an encoding's parameters in RoBERTa-base with 512 positions."""
    dims = BASE._replace(causal="encoders" not in name_families(name))
    return count_parameters(specs.parse(name), dims, BASE_LAYERS)


def run_describe(args: argparse.Namespace) -> int:
    """Print an encoding's sections, options, costs, and number of parameters."""
    if directions := DECBERT.get(args.name):
        print(_DECBERT.format(name=args.name, directions=directions))
        return 0
    described = parse_page(args.name)
    rows = {heading: value for heading, value in zip(HEADINGS, described[1:])}
    rows["Options"] = ", ".join(map(str, registry.options(args.name).values())) or "none"
    rows["Where"] = name_families(args.name)
    beyond = "in a layer, beyond plain attention:"
    rows["Operations"] = f"{beyond} {costs.describe_operations(args.name)}"
    rows["Numbers held"] = f"{beyond} {costs.describe_numbers(args.name)}"
    rows["At base size"] = f"{count_at_base_size(args.name):,} parameters"
    print(f"{args.name}: {described.summary}\n")
    for heading, value in rows.items():
        print(f"{heading:<13} {value}")
    return 0


def run_count(args: argparse.Namespace) -> int:
    """Print the number of position parameters, in total and by name."""
    spec = specs.parse(args.encoding)
    dims = Dims(args.embed_dim, args.heads, args.max_positions, args.decoder)
    if args.layers < 1:
        raise UserError(f"--layers {args.layers}: must be at least 1")
    spec.check_length(args.layers)
    sizes = Assembly(spec, dims).parameters(args.layers)
    total = sum(sizes.values())
    if args.json:
        print(json.dumps({"encoding": str(spec), "total": total, "parameters": sizes}, indent=2))
        return 0
    for name, size in sizes.items():
        print(f"{size:>12,}  {name}")
    print(f"{total:>12,}  {spec}")
    return 0


def add_describe_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the argument of ``fairseq-posenc describe``."""
    parser.add_argument("name", help="name of an encoding, or of one of DecBERT's architectures")


def add_count_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``fairseq-posenc count``; the defaults are RoBERTa-base."""
    parser.add_argument(
        "--encoding",
        required=True,
        metavar="SPEC",
        help="position-encoding spec, as in learned+m4m",
    )
    for name, default, meaning in (
        ("--layers", BASE_LAYERS, "number of layers"),
        ("--embed-dim", BASE.embed_dim, "width of the model"),
        ("--heads", BASE.num_heads, "attention heads of a layer"),
        ("--max-positions", BASE.max_positions, "longest input in tokens"),
    ):
        help = f"{meaning} (default: {default})"
        parser.add_argument(name, type=int, default=default, metavar="N", help=help)
    parser.add_argument("--decoder", action="store_true", help="count for a causal stack")
    parser.add_argument("--json", action="store_true", help="print JSON")


def collect_facts(name: str) -> dict[str, Any]:
    """Collect all facts about an encoding, as JSON values."""
    return {
        "name": name,
        "acts_on": registry.get(name).acts_on,
        "families": name_families(name),
        "options": {
            key: {"type": str(option.annotation), "default": option.default}
            for key, option in registry.options(name).items()
        },
        "parameters_at_base_size": count_at_base_size(name),
        **parse_page(name)._asdict(),
    }


def _join_lines(text: str) -> str:
    return " ".join(text.split())
