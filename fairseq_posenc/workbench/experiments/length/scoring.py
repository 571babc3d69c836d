"""Computes the loss and the perplexity of a model on a stream, by context length."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from fairseq_posenc.encodings.base import Encoding
from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.experiments.length.hf_model import LoadedModel, predict
from fairseq_posenc.workbench.experiments.length.stream import Piece, Stream, batch_windows

_MAX_BITS = 1000.0  # 2 to this power is still a number


@dataclass(frozen=True)
class Score:
    """The loss of a model on a stream, or the reason why it cannot read it."""

    length: int  # context length: most tokens of a window
    stride: int  # tokens of a window that are predicted
    tokens: int  # predicted tokens of all windows
    loss: float | None  # bits per token; None if there is no figure
    seconds: float  # time of scoring
    refusal: str  # reason why there is no figure; else empty
    windows: list[float]  # perplexity of each window

    @property
    def perplexity(self) -> float | None:
        """Perplexity per token."""
        return None if self.loss is None else 2.0**self.loss


@torch.no_grad()
def score_windows(
    loaded: LoadedModel,
    stream: Stream,
    windows: Iterable[Piece],
    length: int,
    stride: int,
    max_tokens: int,
    on_tokens: Callable[[int], object] = lambda tokens: None,
) -> Score:
    """Compute the mean loss of the predicted tokens of windows, and the perplexity of each window.

    Args:
        loaded: the model.
        stream: the text.
        windows: the windows of the text.
        length: most tokens that are read of a window.
        stride: tokens that are predicted of a window.
        max_tokens: most tokens of a batch, unless a window alone has more.
        on_tokens: called with the number of tokens that a batch predicts.
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
            log_probs = predict(
                loaded.model, inputs.to(device), targets.to(device)
            ).double()  # [B, n]
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
