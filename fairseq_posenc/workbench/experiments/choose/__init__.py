"""Recommends an encoding: from measurements, or by training candidates on the user's text.

1. :mod:`~fairseq_posenc.workbench.experiments.choose.answer` answers from measurements.
2. :mod:`~fairseq_posenc.workbench.experiments.choose.halving` trains candidates within a budget of
   time, by successive halving.
3. :mod:`~fairseq_posenc.workbench.experiments.choose.report` reports the ranking, the significant
   differences, and the command of a full training.
"""
