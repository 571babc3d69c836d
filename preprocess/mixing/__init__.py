"""Modules of ``mix.py``: ``documents`` reads and writes, ``draw`` samples, ``mixture`` runs all."""

from fairseq_posenc.workbench.running import host  # noqa: F401  (before fairseq: keeps it quiet, errors short)
