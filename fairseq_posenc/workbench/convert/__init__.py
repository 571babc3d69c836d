"""Converts models: to transformers, ONNX and CTranslate2, from transformers, to other positions."""
