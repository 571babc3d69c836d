"""Parallel text: the modules of ``translation.py``, which reads, filters, encodes and writes it."""
