"""Using and evaluating trained translation models.

- :mod:`~fairseq_posenc.workbench.translation.translator` translates raw text in Python, and
  :mod:`~fairseq_posenc.workbench.translation.command_translate` on the command line.
- :mod:`~fairseq_posenc.workbench.translation.command_bleu` measures models on a test set: it runs
  ``fairseq-generate`` (:mod:`~fairseq_posenc.workbench.translation.generate`), scores what comes
  out (:mod:`~fairseq_posenc.workbench.translation.scores`) and reports it
  (:mod:`~fairseq_posenc.workbench.translation.report`).
"""

from fairseq_posenc.workbench.translation.translator import Hypothesis, Translator

__all__ = ["Hypothesis", "Translator"]
