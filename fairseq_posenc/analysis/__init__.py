"""Describes encodings: facts, a self-test, parts of scores. Training does not import it."""
