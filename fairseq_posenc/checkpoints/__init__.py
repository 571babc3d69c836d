"""Checkpoints: safe loading, what weights mean, adapting to a model, recovery, resumption."""
