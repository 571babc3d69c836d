"""Converts models: to transformers and CTranslate2, from transformers, to other positions."""
