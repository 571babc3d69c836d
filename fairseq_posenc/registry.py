"""Looks up the registered encodings: their names, classes and options."""

import importlib
import inspect
import pkgutil
from functools import cache
from typing import get_type_hints

from fairseq_posenc import encodings
from fairseq_posenc.encodings.base import ENCODINGS, Encoding
from fairseq_posenc.errors import UserError, shortened, suggest

# What users may write for an encoding (of yarn:2, the part before the colon) -> a hint for them.
_HINTS = {
    "rotary": "did you mean rope? ",
    "absolute": "did you mean learned or sinusoidal? ",
    "relative": "did you mean shaw or t5? ",
    "sine": "did you mean sinusoidal? ",
    "nope": "did you mean none? ",
    "yarn": "did you mean rope(scaling=yarn:2)? ",
    "own": "own, in lower case, keeps a model's positions, in transformers alone; ",
}
# Encodings that act on these are companions: they change attention beside another encoding.
_COMPANIONS = ("softmax", "mask", "positions")


@cache
def _import_encodings() -> None:
    """Import all modules of ``encodings``, which register their classes, at the first look-up."""
    for module in pkgutil.iter_modules(encodings.__path__, encodings.__name__ + "."):
        importlib.import_module(module.name)


def names(*, encoder: bool = False, companions: bool = False) -> list[str]:
    """List the names of all encodings, sorted.

    >>> names()[:4]
    ['alibi', 'cope', 'deberta', 'deberta_v2']

    Args:
        encoder: leave out encodings that only work in decoders (``causal_reason`` says why).
        companions: add windows, temperatures, ...
    """
    _import_encodings()
    return sorted(
        name
        for name, cls in ENCODINGS.items()
        if (companions or cls.acts_on not in _COMPANIONS) and not (encoder and cls.causal_reason)
    )


def get(name: str) -> type[Encoding]:
    """Look up the class of an encoding.

    >>> get("alibi").acts_on
    'scores'

    Raises:
        UserError: the name is unknown; the message names similar ones.
    """
    if name not in ENCODINGS:  # else torch.compile would trace the import
        _import_encodings()
    if name not in ENCODINGS:
        near = _HINTS.get(name.partition(":")[0].lower()) or suggest(name, [*ENCODINGS, "own"])
        raise UserError(
            f"unknown position encoding {shortened(name)!r}: {near}`fairseq-posenc list` shows "
            "all; to use one of your own, import its package (in commands: the option user-dir)"
        )
    return ENCODINGS[name]


def options(name: str) -> dict[str, inspect.Parameter]:
    """List the options of an encoding: its constructor's keyword-only arguments.

    >>> {name: option.default for name, option in options("window").items()}
    {'size': 512, 'first': None, 'prefill': False}

    If the constructor has ``**others``, the options of the base class come first, except those that
    the attribute ``without_options`` lists.
    """
    encoding = get(name)
    found: dict[str, inspect.Parameter] = {}
    for cls in encoding.__mro__:
        if (constructor := vars(cls).get("__init__")) is None:
            continue
        hints = get_type_hints(constructor)  # types, where postponed annotations are strings
        parameters = inspect.signature(constructor).parameters
        defined_here = {
            key: parameter.replace(annotation=hints[key])
            for key, parameter in parameters.items()
            if parameter.kind is parameter.KEYWORD_ONLY and key not in encoding.without_options
        }
        found = defined_here | found
        if "others" not in parameters:
            break
    return found
