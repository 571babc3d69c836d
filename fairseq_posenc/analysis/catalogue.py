"""Collects facts about encodings (docstring sections, options, numbers of parameters).

``fairseq-posenc list`` and ``describe`` and the generated pages show them. An encoding's docstring
is a summary, followed by a section for each of ``HEADINGS``; ``Differs``: from its source.
"""

import ast
import inspect
import re
from typing import Literal, cast, get_args, get_origin

from fairseq_posenc import registry, specs
from fairseq_posenc.assembly import count_parameters
from fairseq_posenc.encodings.base import Dims
from fairseq_posenc.option_values import Signed

HEADINGS = ("Equation", "Shapes", "Parameters", "Source", "Differs")
BASE = Dims(embed_dim=768, num_heads=12, max_positions=512)  # RoBERTa-base
BASE_LAYERS = 12
_TYPE_NAMES = {int: "integer", float: "number", Signed: "number", bool: "true or false"}


def parse_page(name: str) -> dict[str, str]:
    """Parse an encoding's docstring into ``summary``, ``equation``, ...; a user's may lack some."""
    summary, *parts = re.split(rf"(?m)^({'|'.join(HEADINGS)}):$", _read_docstring(name))
    sections = {"Summary": summary, **dict(zip(parts[::2], parts[1::2]))}  # heading, section, ...
    return {x.lower(): " ".join(sections.get(x, "").split()) for x in ("Summary", *HEADINGS)}


def summarize(name: str) -> str:
    """Return the summary at the beginning of an encoding's docstring, which may be all of it."""
    return " ".join(_read_docstring(name).partition(f"\n{HEADINGS[0]}:\n")[0].split())


def _read_docstring(name: str) -> str:
    """Read a class's docstring from its source, as Python drops docstrings at PYTHONOPTIMIZE=2."""
    (definition,) = ast.parse(inspect.getsource(registry.get(name))).body  # the class alone
    return ast.get_docstring(cast(ast.ClassDef, definition)) or ""


def count_at_base_size(name: str) -> int:
    """Count an encoding's parameters in RoBERTa-base with 512 positions."""
    spec = specs.parse(name)
    dims = BASE._replace(causal=spec.is_causal_only)
    return sum(count_parameters(spec, dims, BASE_LAYERS).values())


def format_options(name: str) -> str:
    """Write the options of an encoding with their defaults and other values, as Markdown."""
    formatted = []
    for key, option in registry.options(name).items():  # parameters of the constructor
        annotation, default = option.annotation, option.default
        if type(None) in get_args(annotation):  # Optional[X], whose members are X and None
            annotation = get_args(annotation)[0]
        choices = get_args(annotation) if get_origin(annotation) is Literal else ()
        value = str(default).lower() if isinstance(default, bool) else default
        type_name = _TYPE_NAMES.get(annotation, "text")
        shown = f"`{key}` ({type_name})" if default is None else f"`{key}={value}`"
        formatted.append(" or ".join([shown, *(f"`{x}`" for x in choices if x != default)]))
    return ", ".join(formatted) or "none"
