"""Using and evaluating trained translation models.

- :mod:`~fairseq_posenc.translation.translator` translates raw text in Python, and
  :mod:`~fairseq_posenc.translation.command_translate` on the command line.
- :mod:`~fairseq_posenc.translation.command_bleu` measures models on a test set: it runs
  ``fairseq-generate`` (:mod:`~fairseq_posenc.translation.generate`), scores what comes out
  (:mod:`~fairseq_posenc.translation.scores`) and reports it
  (:mod:`~fairseq_posenc.translation.report`).
"""

from fairseq_posenc.translation.translator import Hypothesis, Translator

__all__ = ["Hypothesis", "Translator"]
