"""Modules of ``glue.py``: ``rows`` reads GLUE's files, ``cutting`` truncates, ``binary`` writes."""

from fairseq_posenc.workbench.running import host  # noqa: F401  (before fairseq: keeps it quiet, errors short)
