"""Kept for a release: :mod:`fairseq_posenc.workbench.translation` is the place."""

from fairseq_posenc.workbench.translation import Translator

__all__ = ["Translator"]
