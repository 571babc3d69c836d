"""The report of a comparison, which :mod:`~fairseq_posenc.workbench.experiments` makes."""
