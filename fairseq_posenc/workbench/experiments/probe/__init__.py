"""Tasks with known answers, learned at short lengths and read at long ones.

1. :mod:`~fairseq_posenc.workbench.experiments.probe.tasks` has a function for each task, which
   makes questions and answers.
2. :mod:`~fairseq_posenc.workbench.experiments.probe.data` writes them as data of fairseq.
3. :mod:`~fairseq_posenc.workbench.experiments.probe.experiment` trains with ``fairseq-train`` and
   reads with ``fairseq-validate``, both with the criterion :mod:`~fairseq_posenc.tasks.answers`.
4. :mod:`~fairseq_posenc.workbench.experiments.probe.report` writes the tables and the picture.
"""
