"""The report of a comparison, which :mod:`~fairseq_posenc.running.comparison` makes."""
