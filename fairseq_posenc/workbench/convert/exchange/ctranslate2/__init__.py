"""Models carried to CTranslate2, an engine that serves Transformers on CPUs and GPUs."""
