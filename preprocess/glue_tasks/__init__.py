"""Modules of ``glue.py``: ``rows`` reads GLUE's files, ``binary`` truncates and writes."""

# Imported before fairseq, because it silences fairseq's warnings and shortens errors.
from fairseq_posenc.workbench.running import host  # noqa: F401
