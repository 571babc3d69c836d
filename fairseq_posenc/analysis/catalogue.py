"""Collects facts about encodings (docstring sections, options, numbers of parameters).

``fairseq-posenc describe`` and the generated pages show them.
"""

import inspect
import re
from typing import Any, NamedTuple, Optional, get_args

from fairseq_posenc import registry, specs
from fairseq_posenc.assembly import Assembly
from fairseq_posenc.encodings.axes import Sections
from fairseq_posenc.encodings.base import Dims, Signed

HEADINGS = ("Equation", "Shapes", "Parameters", "Source", "Differs")
BASE = Dims(embed_dim=768, num_heads=12, max_positions=512)  # RoBERTa-base
BASE_LAYERS = 12
_KINDS = {int: "integer", float: "number"}


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
    """Name the stacks that a spec works in: ``decoders``, or ``encoders and decoders``."""
    causal = any(registry.get(item.name).causal_only for item in specs.parse(spec).items)
    return "decoders" if causal else "encoders and decoders"


def count_parameters(spec: specs.Spec, dims: Dims, layers: int) -> int:
    """Count the position parameters of a stack, from its modules."""
    return sum(Assembly(spec, dims).parameters(layers).values())


def count_at_base_size(name: str) -> int:
    """Count an encoding's parameters in RoBERTa-base with 512 positions."""
    dims = BASE._replace(causal="encoders" not in name_families(name))
    return count_parameters(specs.parse(name), dims, BASE_LAYERS)


def list_options(name: str) -> dict[str, inspect.Parameter]:
    """List the options of an encoding with plain types: str, int, float, bool or None."""
    plain = {}
    for key, option in registry.options(name).items():
        annotation = option.annotation
        default = option.default
        if annotation in (Signed, Optional[Signed]):
            annotation = float if annotation is Signed else Optional[float]
        elif annotation == Optional[Sections]:
            annotation = Optional[str]
        elif not isinstance(default, (str, float, int, type(None))):
            annotation = str
            default = str(default)
        plain[key] = option.replace(annotation=annotation, default=default)
    return plain


def format_options(name: str) -> str:
    """Write the options of an encoding with their defaults and other values, as Markdown."""
    return ", ".join(map(_format_option, registry.options(name).values())) or "none"


def collect_facts(name: str) -> dict[str, Any]:
    """Collect all facts about an encoding, as JSON values."""
    return {
        "name": name,
        "acts_on": registry.get(name).acts_on,
        "families": name_families(name),
        "options": {
            key: {"type": str(option.annotation), "default": option.default}
            for key, option in list_options(name).items()
        },
        "parameters_at_base_size": count_at_base_size(name),
        **parse_page(name)._asdict(),
    }


def _format_option(option: inspect.Parameter) -> str:
    """Format an option with its default, or with the kind of value that it takes."""
    kinds = [kind for kind in get_args(option.annotation) if kind is not type(None)]
    if option.default is None:
        (kind,) = kinds
        return f"`{option.name}` ({_KINDS.get(kind, 'text')})"
    default = str(option.default)
    default = default.lower() if isinstance(option.default, bool) else default
    others = [f"`{kind}`" for kind in kinds if kind != option.default]  # those of a Literal
    return " or ".join([f"`{option.name}={default}`", *others])


def _join_lines(text: str) -> str:
    return " ".join(text.split())
