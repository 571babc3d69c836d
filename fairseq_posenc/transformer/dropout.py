"""Makes fairseq's ``--retain-dropout-modules`` (dropout while generating) work for our models."""

import logging
import re
from typing import Any

from fairseq.modules import FairseqDropout
from torch import nn

logger = logging.getLogger(__name__)


class RetainedDropout(nn.Module):
    """Mixin for models, which lets the option name modules by fairseq's classes.

    Each dropout knows its owner's class by name, and fairseq looks for this name in the option. Our
    subclasses have other names, so that fairseq's would retain nothing, without a message.
    """

    def make_generation_fast_(self, **kwargs: Any) -> None:
        """Prepare for generation as fairseq does, with its names for the modules translated."""
        if kwargs.get("retain_dropout_modules"):
            kwargs["retain_dropout_modules"] = _find_owners(self, kwargs["retain_dropout_modules"])
        super().make_generation_fast_(**kwargs)  # type: ignore[misc]


def _find_owners(model: nn.Module, requested: Any) -> list[str]:
    """Look up the classes that own a dropout by fairseq's names, in a list or in one text."""
    names = re.findall(r"\w+", requested) if isinstance(requested, str) else list(requested)
    known: dict[str, set[str]] = {}
    for owner in model.modules():
        modules = {
            child.module_name for child in owner.children() if isinstance(child, FairseqDropout)
        }
        if not modules:
            continue
        for cls in type(owner).__mro__:
            # fairseq's TransformerEncoderLayer, say, is TransformerEncoderLayerBase here.
            for name in (cls.__name__, cls.__name__.removesuffix("Base")):
                known.setdefault(name, set()).update(modules)
    for name in names:
        if name not in known:
            logger.warning("--retain-dropout-modules: no %s in this model has a dropout", name)
    return sorted(set().union(*(known.get(name, set()) for name in names)))
