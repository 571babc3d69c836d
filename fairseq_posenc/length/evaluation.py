"""All figures of one model: each mode at each length, with lines that tell how far it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fairseq_posenc.length.checkpoint import LoadedModel
from fairseq_posenc.length.scoring import Score, score
from fairseq_posenc.length.stream import Stream
from fairseq_posenc.running.progress import bar, format_time, say


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
            name = f"{label}, {mode}, {length:,}"
            with bar(name, len(stream), " tokens") as shown:
                found = score(loaded, stream, length, stride or length, max_tokens, shown.update)
            say(f"{name}: {_told(found)} ({format_time(found.seconds)})")
            scores[mode][length] = found
    return scores


def _told(found: Score) -> str:
    if found.perplexity is None:
        return f"no figure: {found.refusal}"
    return f"perplexity {found.perplexity:,.2f} of {found.tokens:,} tokens"
