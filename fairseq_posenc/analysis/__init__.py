"""Describes encodings for commands and documentation: facts, costs, a self-test, parts of scores.

Training does not import it.
"""
