"""Checkpoints: safe loading, the identity of weights, adapting to a model, recovery."""
