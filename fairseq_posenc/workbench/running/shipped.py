"""Folders beside the package that a wheel has too, as ``preprocess``, ``docs/results``."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[2]


def shipped(name: str) -> Path:
    """Return a folder, which is within the package in a wheel and beside it in a checkout."""
    within = _PACKAGE / name
    return within if within.is_dir() else _PACKAGE.parent / name
