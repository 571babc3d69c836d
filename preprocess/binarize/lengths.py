"""Splits items that are too long, and thins out the empty items between documents."""

from __future__ import annotations

import numpy as np


def split_long(sizes: np.ndarray, longest: int) -> np.ndarray:
    """Split long sizes into as few parts as possible, of nearly equal size.

    Equal parts leave no rest of a single ``</s>``, which fairseq reads as the end of a document.
    """
    parts = -(-sizes // longest)
    if (parts <= 1).all():
        return sizes
    whole, number = np.repeat(sizes, parts), np.repeat(parts, parts)
    which = np.arange(len(number)) - np.repeat(np.cumsum(parts) - parts, parts)
    return (whole // number + (which < whole % number)).astype(sizes.dtype)


def between_documents(keep: np.ndarray, blank: np.ndarray) -> tuple[np.ndarray, bool, bool]:
    """Keep one empty item between documents, and none before the first and after the last.

    In fairseq's ``complete`` mode each is an extra ``</s>``, of which RoBERTa has one a document.

    Args:
        keep: mask of the items that are kept so far, (N,).
        blank: mask of the items that are empty lines, (N,).

    Returns:
        The mask of the items to keep, and whether the text began and ended with empty items.
    """
    kept = np.flatnonzero(keep)
    empty = blank[kept]
    full = np.flatnonzero(~empty)
    if not len(full):
        return np.zeros_like(keep), len(kept) > 0, len(kept) > 0
    follows_text = np.concatenate([[False], ~empty[:-1]])
    inside = np.arange(len(kept)) < full[-1]
    chosen = ~empty | (follows_text & inside)
    result = np.zeros_like(keep)
    result[kept[chosen]] = True
    return result, bool(empty[0]), bool(empty[-1])
