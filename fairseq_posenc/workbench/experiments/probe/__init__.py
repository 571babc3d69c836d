"""Trains models on tasks with known answers, and tests them on questions of many lengths.

1. :mod:`~fairseq_posenc.workbench.experiments.probe.tasks` has a function for each task, which
   makes questions and answers.
2. :mod:`~fairseq_posenc.workbench.experiments.probe.data` writes them as fairseq's binary files.
3. :mod:`~fairseq_posenc.workbench.experiments.probe.experiment` trains with ``fairseq-train`` and
   tests with ``fairseq-validate``, both with the criterion :mod:`~fairseq_posenc.tasks.answers`.
4. :mod:`~fairseq_posenc.workbench.experiments.probe.report` and ``picture`` show the results.
"""
