"""All figures of one model: each mode at each length, with lines that tell how far it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from fairseq_posenc.workbench.experiments.length.checkpoint import LoadedModel
from fairseq_posenc.workbench.experiments.length.scoring import Score, score
from fairseq_posenc.workbench.experiments.length.stream import Stream
from fairseq_posenc.workbench.running.progress import bar, format_time, say
from fairseq_posenc.workbench.running.stages import Outputs, Stage


class Request(NamedTuple):
    """Which figures are wanted.

    Attributes:
        lengths: context lengths.
        strides: the stride of each mode; None for that of the length, so that nothing overlaps.
        max_tokens: tokens to read in a batch.
    """

    lengths: Sequence[int]
    strides: Mapping[str, int | None]
    max_tokens: int


def evaluate(
    loaded: LoadedModel, stream: Stream, request: Request, folder: Path, inputs: Outputs
) -> dict[str, dict[int, Score]]:
    """Compute a model's scores of each mode, by length.

    Args:
        loaded: the model.
        stream: the text.
        request: which figures.
        folder: by which lines call the model; figures are kept in it, and those that are there,
            made from the same inputs, are not made again.
        inputs: what the model and the text are known by.
    """
    scores: dict[str, dict[int, Score]] = {}
    for mode, stride in request.strides.items():
        scores[mode] = {}
        for length in request.lengths:
            sizes = length, stride or length, request.max_tokens
            step = Stage(folder / f"{mode}-{length}", {**inputs, "sizes": sizes})
            name = f"{folder.name}, {mode}, {length:,}"
            facts = step.do(partial(_measure, name, loaded, stream, sizes))
            scores[mode][length] = Score(**facts)
    return scores


def _measure(
    name: str, loaded: LoadedModel, stream: Stream, sizes: tuple[int, int, int]
) -> Outputs:
    with bar(name, len(stream), " tokens") as shown:
        found = score(loaded, stream, *sizes, shown.update)
    say(f"{name}: {_told(found)} ({format_time(found.seconds)})")
    return found._asdict()


def _told(found: Score) -> str:
    if found.perplexity is None:
        return f"no figure: {found.refusal}"
    return f"perplexity {found.perplexity:,.2f} of {found.tokens:,} tokens"
