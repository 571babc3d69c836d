"""Translates with trained models, and evaluates them on test sets.

- :mod:`~fairseq_posenc.workbench.translation.translator` translates raw text in Python, and
  :mod:`~fairseq_posenc.workbench.translation.command_translate` on the command line.
- :mod:`~fairseq_posenc.workbench.translation.command_bleu` evaluates models on a test set: it runs
  ``fairseq-generate`` (:mod:`~fairseq_posenc.workbench.translation.generate`), scores the
  translations (:mod:`~fairseq_posenc.workbench.translation.scores`) and writes a report
  (:mod:`~fairseq_posenc.workbench.translation.report`).
"""

from fairseq_posenc.workbench.translation.translator import Hypothesis, Translator

__all__ = ["Hypothesis", "Translator"]
