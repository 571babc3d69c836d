"""Comparison of position encodings on real text, with fairseq's own commands.

The steps, each in a module of its own:

1. :mod:`~fairseq_posenc.compare.corpus` gets documents and splits them: train and validation.
2. :mod:`~fairseq_posenc.compare.pieces` cuts the text into sentencepieces.
3. :mod:`~fairseq_posenc.compare.pipeline` calls ``fairseq-preprocess``, and for each encoding
   ``fairseq-train`` and ``fairseq-validate``.
4. :mod:`~fairseq_posenc.compare.report` writes the table, the picture and what follows from them.

Every step notes what it was made from (:mod:`~fairseq_posenc.running.steps`), so that the same
command, given again, continues where it was stopped and repeats only what has changed.
"""
