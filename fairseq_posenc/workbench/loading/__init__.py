"""Trained models opened: their state, data, dictionaries and settings."""
