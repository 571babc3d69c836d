"""All figures of one model: each mode at each length, with lines that tell how far it is."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence

from fairseq_posenc.length.checkpoint import LoadedModel
from fairseq_posenc.length.scoring import Score, score
from fairseq_posenc.length.stream import Stream
from fairseq_posenc.running.progress import format_time

_PAUSE = 10.0  # seconds between two lines about one figure


def say(text: str) -> None:
    """Print a line about the progress; standard output is for the results."""
    print(text, file=sys.stderr, flush=True)


def evaluate(
    label: str,
    loaded: LoadedModel,
    stream: Stream,
    lengths: Sequence[int],
    strides: Mapping[str, int | None],
    max_tokens: int,
) -> dict[str, dict[int, Score]]:
    """Return a model's scores of each mode, by length.

    Args:
        label: what the lines call the model.
        loaded: the model.
        stream: the text.
        lengths: context lengths.
        strides: the stride of each mode; None for that of the length, so that nothing overlaps.
        max_tokens: tokens to read in a batch.
    """
    scores: dict[str, dict[int, Score]] = {}
    for mode, stride in strides.items():
        scores[mode] = {}
        for length in lengths:
            progress = _Progress(f"{label}, {mode}, {length:,}", len(stream))
            found = score(loaded, stream, length, stride or length, max_tokens, progress.show)
            progress.end(found)
            scores[mode][length] = found
    return scores


class _Progress:
    """Tells how many tokens of a figure are scored, once in a while, and what came out."""

    def __init__(self, label: str, total: int) -> None:
        self._label = label
        self._total = total
        self._last_line = time.monotonic()

    def show(self, tokens: int) -> None:
        if time.monotonic() - self._last_line >= _PAUSE:
            self._last_line = time.monotonic()
            say(f"{self._label}: {tokens:,} of {self._total:,} tokens")

    def end(self, found: Score) -> None:
        told = f"no figure: {found.refusal}"
        if found.perplexity is not None:
            told = f"perplexity {found.perplexity:,.2f} of {found.tokens:,} tokens"
        say(f"{self._label}: {told} ({format_time(found.seconds)})")
