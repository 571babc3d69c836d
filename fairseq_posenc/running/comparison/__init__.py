"""Small models trained on one text, alike but for their positions, with fairseq's own commands.

The steps, each in a module of its own:

1. :mod:`~fairseq_posenc.running.comparison.corpus` gets documents and splits them.
2. :mod:`~fairseq_posenc.running.comparison.pieces` cuts the text into sentencepieces.
3. :mod:`~fairseq_posenc.running.comparison.pipeline` calls ``fairseq-preprocess``, and for each
   encoding, learning rate and seed ``fairseq-train`` and ``fairseq-validate``.
4. :mod:`~fairseq_posenc.running.comparison.judging` judges each model over its seeds.

Every step notes what it was made from (:mod:`~fairseq_posenc.running.steps`), so that the same
command, given again, continues where it was stopped and repeats only what has changed.
"""
