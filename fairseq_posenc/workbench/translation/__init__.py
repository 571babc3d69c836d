"""Translates with trained models, and evaluates them on test sets."""

from fairseq_posenc.workbench.translation.translator import Hypothesis, Translator

__all__ = ["Hypothesis", "Translator"]
