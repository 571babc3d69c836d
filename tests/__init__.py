"""Tests, in the tree of the package; what they share is in ``helpers``."""
