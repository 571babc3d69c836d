"""Kept for a release: :mod:`fairseq_posenc.workbench.running` is the place."""
