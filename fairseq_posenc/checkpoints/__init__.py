"""Checkpoints: safe loading, adapting to a model, recovery, resumption."""
