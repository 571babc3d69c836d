"""Small models trained on one text, alike but for their positions, with fairseq's own commands.

The steps, each in a module of its own:

1. :mod:`~fairseq_posenc.workbench.experiments.corpus` gets documents and splits them.
2. :mod:`~fairseq_posenc.workbench.experiments.pieces` cuts the text into sentencepieces.
3. :mod:`~fairseq_posenc.workbench.experiments.text_experiment` calls ``fairseq-preprocess``, and
   for each encoding, learning rate and seed ``fairseq-train``.
4. :mod:`~fairseq_posenc.workbench.experiments.results` aggregates each model over its seeds.

A probe (:mod:`~fairseq_posenc.workbench.experiments.probe`) makes data of tasks instead. Both are
:class:`~fairseq_posenc.workbench.experiments.experiment.Experiment`s.

Every step notes what it was made from (:mod:`~fairseq_posenc.workbench.running.stages`), so that
the same command, given again, continues where it was stopped and repeats only what has changed.
"""
