"""Pictures of position encodings and of attention: the commands ``plot`` and ``inspect``."""
