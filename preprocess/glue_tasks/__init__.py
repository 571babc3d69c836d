"""Modules of ``glue.py``: ``rows`` reads GLUE's files, ``binary`` truncates and writes."""

from fairseq_posenc.workbench.running import host  # noqa: F401  (before fairseq: keeps it quiet, errors short)
