"""Translates with trained models, and evaluates them on test sets."""

from fairseq_posenc.workbench import loading  # noqa: F401  # first: it imports fairseq quietly
from fairseq_posenc.workbench.translation.translator import Hypothesis, Translator

__all__ = ["Hypothesis", "Translator"]
