"""Which encoding to take: by what was measured, or by training candidates on the user's text.

1. :mod:`~fairseq_posenc.choose.answer` says what the records say.
2. :mod:`~fairseq_posenc.choose.halving` spends a budget of time on candidates, by successive
   halving, with the trainings of :mod:`~fairseq_posenc.running.comparison`.
3. :mod:`~fairseq_posenc.choose.report` has the ranking, what could not be told apart, the command.
"""
