"""Loss and perplexity of a model on a stream, in each mode at each context length."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from fairseq_posenc.encodings.base import Encoding
from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.experiments.length.checkpoint import LoadedModel
from fairseq_posenc.workbench.experiments.length.stream import (
    Stream,
    Window,
    batch_windows,
    cut_windows,
    spread_windows,
)
from fairseq_posenc.workbench.running.progress import bar, format_time, say
from fairseq_posenc.workbench.running.stages import Inputs, Outputs, Stage

_MOST_BITS = 1000.0  # 2 to this power is still a number


class Score(NamedTuple):
    """How well a model predicts a stream, or why it cannot."""

    length: int  # most tokens that the model read at a time
    stride: int  # tokens predicted at a time
    tokens: int  # tokens predicted in all
    loss: Optional[float]  # bits per token; None if the model refused
    seconds: float  # wall-clock time
    refusal: str = ""  # why there is no figure
    # where windows are spread over the stream, the perplexity in each of them
    windows: Sequence[float] = ()

    @property
    def perplexity(self) -> Optional[float]:
        """Perplexity per token."""
        return None if self.loss is None else 2.0**self.loss


class Evaluation(NamedTuple):
    """The scores of a model, each computed once and kept in a folder of its own."""

    folder: Path  # where their folders lie; messages call the model by its name
    inputs: Inputs  # what the scores depend on, without their lengths
    lengths: Sequence[int]  # context lengths
    # the stride of each mode; None for that of the length, so that nothing overlaps
    strides: Mapping[str, int | None]
    max_tokens: int  # tokens to read in a batch
    spread: int | None = None  # how many windows are spread over the stream; None reads all of it

    def stages(self) -> Iterator[tuple[str, int, Stage]]:
        """Yield mode, context length and stage of each score."""
        for mode, stride in self.strides.items():
            for length in self.lengths:
                inputs = {**self.inputs, "sizes": (length, stride or length, self.max_tokens)}
                if self.spread is not None:
                    inputs["windows"] = self.spread, self.lengths[-1]
                yield mode, length, Stage(self.folder / f"{mode}-{length}", inputs)

    def count_left(self) -> int:
        """Count the scores that are not there."""
        return sum(stage.outputs is None for _, _, stage in self.stages())

    def compute(self, loaded: LoadedModel, stream: Stream) -> None:
        """Compute the scores that are not there."""
        for mode, length, stage in self.stages():
            name = f"{self.folder.name}, {mode}, {length:,}"
            stage.do(partial(_measure, name, loaded, stream, stage.inputs))

    def read(self) -> dict[str, dict[int, Score]]:
        """Read the scores of each mode, by length; all are there."""
        scores: dict[str, dict[int, Score]] = {mode: {} for mode in self.strides}
        for mode, length, stage in self.stages():
            scores[mode][length] = Score(**(stage.outputs or {}))
        return scores


def _measure(name: str, loaded: LoadedModel, stream: Stream, inputs: Inputs) -> Outputs:
    length, stride, max_tokens = inputs["sizes"]
    spread = inputs.get("windows")
    with bar(name, spread[0] * stride if spread else len(stream), " tokens") as shown:
        score = score_stream(loaded, stream, length, stride, max_tokens, shown.update, spread)
    figure = f"no figure: {score.refusal}"
    if score.perplexity is not None:
        figure = f"perplexity {score.perplexity:,.2f} of {score.tokens:,} tokens"
    say(f"{name}: {figure} ({format_time(score.seconds)})")
    return score._asdict()


def score_stream(
    loaded: LoadedModel,
    stream: Stream,
    length: int,
    stride: int,
    max_tokens: int,
    on_tokens: Callable[[int], None] = lambda tokens: None,
    spread: Sequence[int] | None = None,
) -> Score:
    """Score every token of a stream once; tell ``on_tokens`` of each batch how many.

    At most ``length`` tokens are read at a time and ``stride`` predicted, in batches of
    ``max_tokens``, if that is more than one window. ``spread`` is a number of windows and the
    longest length, for :func:`spread_windows` in place of the whole stream.
    """
    began = time.monotonic()
    total, tokens, refusal = 0.0, 0, ""
    perplexities: list[float] = []
    windows = cut_windows(len(stream), length, stride)
    if spread is not None:
        count, longest = spread
        windows = spread_windows(len(stream), length, stride, longest, count)
    try:
        if loaded.limit is not None and length > loaded.limit:
            raise UserError(f"{length} tokens are more than the model's limit of {loaded.limit}")
        for module in loaded.model.modules():
            if isinstance(module, Encoding):
                module.make_room(length)
        for batch in batch_windows(windows, max_tokens):
            log_probs = compute_log_probabilities(loaded, stream, batch)
            total += float(log_probs.double().sum())
            tokens += log_probs.numel()
            if spread is not None:
                perplexities += log_probs.double().mean(1).neg().exp().tolist()
            on_tokens(log_probs.numel())
    except UserError as error:  # an encoding that cannot read so much
        refusal = str(error)
    loss = -total / max(1, tokens) / math.log(2)
    if not refusal and not loss < _MOST_BITS:  # so that NaN fails
        refusal = "the model's probabilities are too small for a number"
    seconds = time.monotonic() - began
    return Score(length, stride, tokens, None if refusal else loss, seconds, refusal, perplexities)


@torch.no_grad()
def compute_log_probabilities(loaded: LoadedModel, stream: Stream, batch: list[Window]) -> Tensor:
    """Compute the natural logarithms of the probabilities of predicted tokens, ``(B, n)``.

    All windows of the batch have one shape.
    """
    device = next(loaded.model.parameters()).device
    tokens = torch.stack([stream.inputs[w.start : w.end] for w in batch])  # [B, T]
    targets = torch.stack([stream.targets[w.scored : w.end] for w in batch])  # [B, n]
    return loaded.predict(tokens.to(device), targets.to(device))
