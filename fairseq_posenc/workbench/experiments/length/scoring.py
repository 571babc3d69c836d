"""Computes the loss and the perplexity of a model on a stream, by mode and context length.

Modes are ``non-overlapping``, where the stride equals the context length, and ``sliding``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, Optional

import torch

from fairseq_posenc.encodings.base import Encoding
from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.experiments.length.model import LoadedModel
from fairseq_posenc.workbench.experiments.length.stream import (
    Stream,
    Window,
    batch_windows,
    cut_windows,
    spread_windows,
)
from fairseq_posenc.workbench.results.record import Row
from fairseq_posenc.workbench.running.jobs import Inputs, Job, Outputs, RunContext, Step
from fairseq_posenc.workbench.running.progress import bar, format_time, say

_MAX_BITS = 1000.0  # 2 to this power is still a number


class Score(NamedTuple):
    """The loss of a model on a stream, or the reason why it cannot read it."""

    length: int  # context length: most tokens of a window
    stride: int  # tokens of a window that are predicted
    tokens: int  # predicted tokens of all windows
    loss: Optional[float]  # bits per token; None if there is no figure
    seconds: float  # time of scoring
    refusal: str = ""  # reason why there is no figure
    windows: Sequence[float] = ()  # perplexity of each window, unless the whole stream was scored

    @property
    def perplexity(self) -> Optional[float]:
        """Perplexity per token."""
        return None if self.loss is None else 2.0**self.loss

    def figures(self) -> Row:
        """Collect the figures by column of a record, which has a column for each window."""
        figures = self._asdict()
        for number, perplexity in enumerate(figures.pop("windows"), start=1):
            figures[f"window_{number}"] = perplexity
        return {**figures, "perplexity": self.perplexity}


class Size(NamedTuple):
    """How a stream is cut into windows for a score."""

    mode: str  # `non-overlapping` or `sliding`
    length: int  # context length: most tokens of a window
    stride: int  # tokens of a window that are predicted


class Scoring(NamedTuple):
    """The scores to compute for a model, one for each mode and context length."""

    folder: Path  # folder of the results; its name is the model's in messages
    inputs: Inputs  # all that the scores depend on, except the sizes and the windows
    open_model: Callable[[], tuple[LoadedModel, Stream]]  # opens the model and the text
    sizes: Sequence[Size]  # one for each score
    max_tokens: int  # most tokens of a batch
    spread: Optional[int] = None  # number of windows spread over the stream; None scores all of it

    @property
    def longest(self) -> int:
        """The longest context."""
        return max(size.length for size in self.sizes)

    def build_job(self) -> Job:
        """Build the job of the model, with a step for each score."""
        steps = []
        for size in self.sizes:
            # As in the stamps of earlier versions, whose scores stay valid.
            inputs = {**self.inputs, "sizes": (size.length, size.stride, self.max_tokens)}
            if self.spread is not None:
                inputs["windows"] = self.spread, self.longest
            folder = self.folder / f"{size.mode}-{size.length}"
            steps.append(Step(folder, inputs, partial(self._measure, size)))
        return Job(self.folder.name, self.folder, tuple(steps))

    def read(self, job: Job) -> list[Row]:
        """Read the figures of each score from a finished job."""
        return [
            {"evaluation": size.mode, **Score(**(step.outputs or {})).figures()}
            for size, step in zip(self.sizes, job.steps)
        ]

    def _measure(self, size: Size, context: RunContext) -> Outputs:
        """Compute a score: the work of a step."""
        mode, length, stride = size
        loaded, stream = self.open_model()
        if self.spread is None:
            windows, predicted = cut_windows(stream.size, length, stride), stream.size
        else:
            windows = spread_windows(stream.size, length, stride, self.longest, self.spread)
            predicted = self.spread * stride
        name = f"{self.folder.name}, {mode}, {length:,}"
        with bar(name, predicted, " tokens") as shown:
            score = score_windows(
                loaded, stream, windows, length, stride, self.max_tokens, shown.update
            )
        if self.spread is None:
            score = score._replace(windows=())
        figure = f"no figure: {score.refusal}"
        if score.perplexity is not None:
            figure = f"perplexity {score.perplexity:,.2f} of {score.tokens:,} tokens"
        say(f"{name}: {figure} ({format_time(score.seconds)})")
        return score._asdict()


@torch.no_grad()
def score_windows(
    loaded: LoadedModel,
    stream: Stream,
    windows: Iterable[Window],
    length: int,
    stride: int,
    max_tokens: int,
    on_tokens: Callable[[int], None] = lambda tokens: None,
) -> Score:
    """Compute the mean loss of the predicted tokens of windows, and the perplexity of each window.

    Of a window at most ``length`` tokens are read, and ``stride`` predicted. A batch has at most
    ``max_tokens``, unless a window alone has more; ``on_tokens`` gets the number that it predicts.
    """
    began = time.monotonic()
    device = next(loaded.model.parameters()).device
    log_likelihood = 0.0  # sum over all predicted tokens, in nats
    tokens = 0
    refusal = ""
    perplexities: list[float] = []
    try:
        if loaded.limit is not None and length > loaded.limit:
            raise UserError(f"{length} tokens are more than the model's limit of {loaded.limit}")
        for module in loaded.model.modules():
            if isinstance(module, Encoding):
                module.make_room(length)
        for batch in batch_windows(windows, max_tokens):
            inputs = torch.stack([stream.inputs[w.start : w.end] for w in batch])  # [B, T]
            targets = torch.stack([stream.targets[w.scored : w.end] for w in batch])  # [B, n]
            log_probs = loaded.predict(inputs.to(device), targets.to(device)).double()  # [B, n]
            log_likelihood += float(log_probs.sum())
            tokens += log_probs.numel()
            perplexities += log_probs.mean(1).neg().exp().tolist()
            on_tokens(log_probs.numel())
    except UserError as error:  # the model cannot read so long a window, which is a result
        refusal = str(error)
    loss = -log_likelihood / max(1, tokens) / math.log(2)
    if not refusal and not loss < _MAX_BITS:  # the comparison is false for NaN too
        refusal = "the model's probabilities are too small for a number"
    seconds = time.monotonic() - began
    return Score(length, stride, tokens, None if refusal else loss, seconds, refusal, perplexities)
