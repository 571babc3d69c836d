"""Parts of ``mix.py``: ``corpora`` are what is asked for, ``documents`` reads, ``draw`` chooses."""

from fairseq_posenc.workbench.running import host  # noqa: F401  (before fairseq: keeps it quiet, errors short)
