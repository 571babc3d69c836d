"""What was measured of each encoding, read from the records in ``docs/results``.

1. :mod:`~fairseq_posenc.workbench.results.evidence.measured` finds the figure of an encoding for a
   question.
2. :mod:`~fairseq_posenc.workbench.results.evidence.page` makes ``docs/choose.md`` of all of them.

A figure that no record has is "not measured", here and in what is made of it.
"""
