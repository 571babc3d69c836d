"""Recommends an encoding: from measurements, or by training candidates on the user's text.

1. :mod:`~fairseq_posenc.workbench.experiments.choose.answer` answers from measurements, and
   :mod:`~fairseq_posenc.workbench.experiments.choose.from_trained` for models that are trained.
2. :mod:`~fairseq_posenc.workbench.experiments.choose.halving` trains candidates within a budget of
   time, by successive halving, and :mod:`~fairseq_posenc.workbench.experiments.choose.on_text`
   reports the results.
"""
