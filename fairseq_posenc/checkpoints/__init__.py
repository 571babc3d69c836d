"""Loads checkpoints safely, adapts them to a model, and recovers and resumes training runs."""
