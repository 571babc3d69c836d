"""Modules of ``mix.py``: ``draw`` samples documents, ``mixture`` reads and writes them."""

# Imported before fairseq, because it silences fairseq's warnings and shortens errors.
from fairseq_posenc.workbench.running import host  # noqa: F401
