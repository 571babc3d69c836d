"""Modules of ``glue.py``: ``rows`` reads GLUE's files, ``binary`` truncates and writes."""
