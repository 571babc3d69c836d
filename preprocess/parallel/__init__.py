"""Parallel text: what ``translation.py`` reads, checks, filters, cuts into pieces and writes."""
