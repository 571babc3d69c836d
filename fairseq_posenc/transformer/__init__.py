"""Subclasses fairseq's attention, layers and stacks, and reads our options; for ``models``."""
