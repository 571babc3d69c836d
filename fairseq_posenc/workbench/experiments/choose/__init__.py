"""Which encoding to take: by what was measured, or by training candidates on the user's text.

1. :mod:`~fairseq_posenc.workbench.experiments.choose.answer` says what the records say.
2. :mod:`~fairseq_posenc.workbench.experiments.choose.halving` spends a budget of time on
   candidates, by successive halving, with the trainings of
   :mod:`~fairseq_posenc.workbench.experiments`.
3. :mod:`~fairseq_posenc.workbench.experiments.choose.report` says what was measured, the ranking,
   what differs, and the command of a real training.
"""
