"""Exports models to CTranslate2, an engine that runs Transformers on CPUs and GPUs."""
