"""Modules of ``mix.py``: ``draw`` samples, ``mixture`` reads, runs all and writes."""

from fairseq_posenc.workbench.running import host  # noqa: F401  (before fairseq: keeps it quiet, errors short)
