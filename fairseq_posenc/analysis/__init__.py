"""Describes encodings for commands and documentation: facts, a self-test, parts of scores.

Training does not import it.
"""
