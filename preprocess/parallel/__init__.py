"""Modules of ``translation.py``, which read, filter, encode and write parallel text."""
