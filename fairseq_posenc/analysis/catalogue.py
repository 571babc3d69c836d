"""Collects facts about encodings (docstring sections, options, numbers of parameters).

``fairseq-posenc describe`` and the generated pages show them. An encoding's docstring is a summary,
followed by a section for each of ``HEADINGS``.
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
_TYPE_NAMES = {int: "integer", float: "number"}


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
    headings = rf"^({'|'.join(HEADINGS)}):$"
    summary, *parts = re.split(headings, text, flags=re.MULTILINE)  # heading, section, heading, ...
    sections = dict(zip(parts[::2], parts[1::2]))
    missing = [heading for heading in HEADINGS if not sections.get(heading, "").strip()]
    if missing:
        raise ValueError(f"the docstring of {name} lacks {', '.join(missing)}")
    texts = (summary, *(sections[heading] for heading in HEADINGS))
    return Page(*(" ".join(text.split()) for text in texts))


def name_families(spec: str) -> str:
    """Name the stacks that a spec works in: ``decoders``, or ``encoders and decoders``."""
    causal_only = any(registry.get(item.name).causal_reason for item in specs.parse(spec).items)
    return "decoders" if causal_only else "encoders and decoders"


def count_at_base_size(name: str) -> int:
    """Count an encoding's parameters in RoBERTa-base with 512 positions."""
    dims = BASE._replace(causal="encoders" not in name_families(name))
    return sum(Assembly(specs.parse(name), dims).parameters(BASE_LAYERS).values())


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
    """Format an option with its default and other values; without a default, with its type."""
    members = [member for member in get_args(option.annotation) if member is not type(None)]
    if option.default is None:  # Optional[X], whose only member is X
        return f"`{option.name}` ({_TYPE_NAMES.get(members[0], 'text')})"
    default = str(option.default)
    default = default.lower() if isinstance(option.default, bool) else default
    others = [f"`{value}`" for value in members if value != option.default]  # of a Literal
    return " or ".join([f"`{option.name}={default}`", *others])
