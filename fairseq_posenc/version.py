"""Defines the version of the package; only CITATION.cff repeats it."""

__version__ = "0.2.0"
