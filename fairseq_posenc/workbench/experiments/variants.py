"""Variants, the models to compare: position encodings by spec, and DecBERT by short names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fairseq_posenc.errors import UserError, suggest
from fairseq_posenc.models.decbert import DECBERT
from fairseq_posenc.specs import parse

MASKED, CAUSAL, BOTH = FAMILIES = ("masked-lm", "causal-lm", "encoder-decoder")
DEFAULT = "none,learned,rope,alibi,m4m"

_BETWEEN = re.compile(r",(?![^(]*\))")  # commas outside of brackets
# Name -> spec and directions: DecBERT's settings, each with learned positions and without.
SHORTHANDS = {
    **{name: ("learned", directions) for name, directions in DECBERT.items()},
    **{f"{name}_nope": ("none", directions) for name, directions in DECBERT.items()},
}


class Variant(NamedTuple):
    """One model of the comparison."""

    name: str  # what the user wrote; names the row of the table
    position_encoding: str  # canonical spec for `--position-encoding`
    # value of `--attention-directions`; empty if every layer looks both ways
    directions: str = ""

    @property
    def model(self) -> tuple[str, str]:
        """What is trained, whatever it is called: spec and directions."""
        return self.position_encoding, self.directions

    @property
    def folder(self) -> str:
        """The name as a folder name that needs no quoting in a shell."""
        name = _BETWEEN.sub("--", self.name.replace(" ", "")).replace("*", "x")
        return name.replace("(", "-").replace(")", "")

    @property
    def options(self) -> list[str]:
        """The options of ``fairseq-train`` in which this model differs from the others."""
        options = ["--position-encoding", self.position_encoding]
        return options + (["--attention-directions", self.directions] if self.directions else [])


class Run(NamedTuple):
    """One training of an experiment."""

    variant: Variant  # the model
    seed: int  # seeds initial weights, order of the data, and masks
    case: str  # its learning rate, as the user wrote it; of a probe its task


def split_list(text: str) -> list[str]:
    """Split a list of specs at its semicolons, or, where it has none, at commas.

    Commas in the brackets of options separate nothing. Specs that differ from layer to layer have
    commas of their own, as in ``none;3*rope,none``.
    """
    items = text.removesuffix(";").split(";") if ";" in text else _BETWEEN.split(text)
    return [item.strip() for item in items]


def join_list(specs: Sequence[str]) -> str:
    """Join specs to a list that :func:`split_list` splits into the same."""
    if not any(_BETWEEN.search(spec) for spec in specs):
        return ",".join(specs)
    return ";".join(specs) + (";" if len(specs) == 1 else "")


def parse_variants(text: str) -> tuple[Variant, ...]:
    """Parse a list of specs and short names; see :func:`split_list`.

    Raises:
        UserError: an item is empty, unknown or malformed, or means the same model as another.
    """
    variants: list[Variant] = []
    for item in split_list(text):
        variant = _parse_one(item, text)
        for other in variants:
            if variant.model == other.model:
                both = repr(item) if item == other.name else f"{other.name!r} and {item!r}"
                raise UserError(f"--encodings: {both} would train the same model twice")
        variants.append(variant)
    return tuple(variants)


def refuse_directions(variants: Iterable[Variant]) -> None:
    """Check that all can be causal LMs.

    Raises:
        UserError: one has directions.
    """
    for variant in variants:
        if variant.directions:
            raise UserError(
                f"--encodings: {variant.name!r} has directions, which are for encoders; a "
                "causal LM sees only lr"
            )


def _parse_one(item: str, text: str) -> Variant:
    if not item:
        raise UserError(f"--encodings {text!r}: an empty name; write for example {DEFAULT}")
    spec, directions = SHORTHANDS.get(item, (item, ""))
    try:
        return Variant(item, str(parse(spec)), directions)
    except UserError as error:
        message = str(error)
        if meant := suggest(item, SHORTHANDS):
            message = f"unknown name {item!r}: {meant}fairseq-posenc list shows encodings"
        raise UserError(f"--encodings: {message}") from None
