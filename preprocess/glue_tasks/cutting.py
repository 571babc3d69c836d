"""Examples that are too long for a model."""

from __future__ import annotations

import numpy as np


def kept_lengths(lengths: np.ndarray, room: int) -> np.ndarray:
    """Return how many tokens of each sentence are kept: the longer one of two is cut first.

    It is what taking away one token after the other gives, each time from the longer sentence, and
    from the second if they are equal.

    Args:
        lengths: (N, 1) or (N, 2), without the symbols around the sentences.
        room: most tokens of an example, likewise.

    Returns:
        lengths of the same shape.
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


def cut(tokens: np.ndarray, sizes: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Return the tokens of sentences without what is cut; the last one of each stays.

    Args:
        tokens: of all sentences, one after the other, each with ``</s>`` at its end.
        sizes: of the sentences, with ``</s>``, (N,).
        kept: tokens to keep of each, without ``</s>``, (N,).
    """
    ends = np.cumsum(sizes)
    place = np.arange(len(tokens)) - np.repeat(ends - sizes, sizes)  # of a token in its sentence
    keep = place < np.repeat(kept, sizes)
    keep[ends - 1] = True
    return tokens[keep]
