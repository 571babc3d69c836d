"""Variants: the models to compare, named by the spec of their positions or by DecBERT's names.

A variant is a spec and, for DecBERT's models, the directions in which the first layers attend:
``rope`` has the spec ``rope`` in all layers, ``decbert_same`` has ``learned`` and directions.
"""

import re
from typing import NamedTuple

from fairseq_posenc.errors import UserError, suggest
from fairseq_posenc.specs import parse
from fairseq_posenc.user_dir import DECBERT

MASKED = "masked-lm"
CAUSAL = "causal-lm"
TRANSLATION = "translation"
FAMILIES = (MASKED, CAUSAL, TRANSLATION)
DEFAULT_ENCODINGS = "none,learned,rope,alibi,m4m"

_COMMA = re.compile(r",(?![^(]*\))")  # a comma outside brackets
_HINT = "separate specs that have commas by semicolons"
# Specs and directions by name: DecBERT's models with learned positions and without positions.
SHORTHANDS = {
    **{name: ("learned", directions) for name, directions in DECBERT.items()},
    **{f"{name}_nope": ("none", directions) for name, directions in DECBERT.items()},
}


class Variant(NamedTuple):
    """A model to compare."""

    name: str  # given by the user, shown in tables
    position_encoding: str  # canonical spec for `--position-encoding`
    directions: str = ""  # value of `--attention-directions`; empty if all layers attend both ways

    @property
    def folder(self) -> str:
        """The name without brackets, stars and so on: ``3xrope--none`` for ``3*rope,none``."""
        name = _COMMA.sub("--", self.name.replace(" ", "")).replace("*", "x")
        return re.sub(r"[(,/]", "-", name).replace(")", "")

    @property
    def options(self) -> list[str]:
        """The options of ``fairseq-train`` that distinguish this model from other variants."""
        options = ["--position-encoding", self.position_encoding]
        if self.directions:
            options += ["--attention-directions", self.directions]
        return options


def parse_variants(text: str) -> tuple[Variant, ...]:
    """Parse a list of specs and short names, at semicolons or else at commas outside brackets.

    Specs that differ between layers have commas: ``none;3*rope,none`` or, alone, ``3*rope,none;``.

    Raises:
        UserError: an item is empty, unknown or malformed, or means the same model as another.
    """
    variants: list[Variant] = []
    items = text.removesuffix(";").split(";") if ";" in text else _COMMA.split(text)
    for item in map(str.strip, items):
        variant = _parse_variant(item, text)
        for other in variants:
            if variant.options == other.options:
                both = repr(item) if item == other.name else f"{other.name!r} and {item!r}"
                raise UserError(f"--encodings: {both} would train the same model twice; {_HINT}")
        variants.append(variant)
    return tuple(variants)


def _parse_variant(item: str, text: str) -> Variant:
    if not item:
        raise UserError(f"--encodings {text!r}: an empty name; write as in {DEFAULT_ENCODINGS}")
    spec, directions = SHORTHANDS.get(item, (item, ""))
    try:
        return Variant(item, str(parse(spec)), directions)
    except UserError as error:
        message = str(error)
        # The error suggests only encodings; the item may be a mistyped short name.
        if question := suggest(item, SHORTHANDS):  # "did you mean NAME? ", or ""
            message = f"unknown name {item!r}: {question}fairseq-posenc list shows encodings"
        raise UserError(f"--encodings: {message}") from None
