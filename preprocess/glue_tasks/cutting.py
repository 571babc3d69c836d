"""Truncates examples that are too long for a model."""

from __future__ import annotations

import numpy as np


def truncated_lengths(lengths: np.ndarray, room: int) -> np.ndarray:
    """Compute the tokens to keep of each sentence: the longer one of two is cut first.

    The result is that of removing one token after the other, each time from the longer sentence,
    and from the second if they are equal.

    Args:
        lengths: tokens of the sentences without the symbols around them, (N, 1) or (N, 2).
        room: maximum tokens of an example, likewise.

    Returns:
        The lengths to keep, of the same shape.
    """
    if lengths.shape[1] == 1:
        return np.minimum(lengths, room)
    first, second = lengths.T
    half, other = room - room // 2, room // 2
    both = first + second > room
    cut_first = np.maximum(half, room - np.minimum(second, other))
    cut_second = np.maximum(other, room - np.minimum(first, half))
    kept = np.minimum(lengths, np.stack([cut_first, cut_second], axis=1))
    return np.where(both[:, None], kept, lengths)


def truncate(tokens: np.ndarray, sizes: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Truncate sentences; the last token of each stays.

    Args:
        tokens: tokens of all sentences, each with ``</s>`` at its end, (T,).
        sizes: sizes of the sentences, with ``</s>``, (N,).
        kept: tokens to keep of each, without ``</s>``, (N,).
    """
    ends = np.cumsum(sizes)
    place = np.arange(len(tokens)) - np.repeat(ends - sizes, sizes)  # in the sentence, (T,)
    keep = place < np.repeat(kept, sizes)
    keep[ends - 1] = True
    return tokens[keep]
