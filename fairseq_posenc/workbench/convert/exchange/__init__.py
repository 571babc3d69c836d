"""Exports models to transformers, ONNX and CTranslate2, and imports them from transformers."""
