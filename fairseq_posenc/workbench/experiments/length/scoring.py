"""Cuts a text into windows, and computes the loss and the perplexity of a model on them."""

import inspect
import math
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby, islice
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from fairseq_posenc.encodings.base import Encoding
from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.hf.folders import read_limit

_MAX_BITS = 1000.0  # bits per token; 2 to this power is still finite
_TOKENS_AT_A_TIME = 1024  # number whose losses are computed together, to save memory


class TextWindow(NamedTuple):
    """A part of a text; the model reads the tokens before each one that it predicts."""

    start: int  # it reads from token `start - 1` on; -1 is the beginning-of-text token
    scored: int  # it predicts tokens `scored` to `end - 1`
    end: int


def cut_windows(total: int, length: int, stride: int) -> Iterator[TextWindow]:
    """Cut a text of ``total`` tokens so that every token is predicted exactly once.

    A window reads at most ``length`` tokens and predicts the last ``stride`` of them, so each has
    at least ``length - stride`` tokens of context, except at the beginning of the text. If both
    are equal, windows do not overlap.

    Source:
        Press et al. (2022), "ALiBi", arXiv:2108.12409, appendix B; the windows are those of
        ``fairseq-eval-lm --context-window (length - stride)``.
    """
    for scored in range(0, total, stride):
        yield TextWindow(max(0, scored - length + stride), scored, min(scored + stride, total))


def spread_windows(
    total: int, length: int, stride: int, longest: int, count: int
) -> Iterator[TextWindow]:
    """Spread ``count`` windows evenly over a text, to compare lengths up to ``longest``.

    Windows of all lengths end at the same tokens, the first one at ``longest``, so they predict the
    same tokens: the last ``stride`` of each window. They predict no token twice if at least
    ``(count - 1) * stride`` tokens follow the first window.
    """
    for number in range(count):
        end = longest + (total - longest) * number // max(1, count - 1)  # 1 for a single window
        yield TextWindow(end - length, end - stride, end)


def batch_windows(windows: Iterable[TextWindow], max_tokens: int) -> Iterator[list[TextWindow]]:
    """Group neighbors of equal sizes into batches of ``max_tokens``, or of one longer window."""
    for (read, _), same in groupby(windows, lambda x: (x.end - x.start, x.end - x.scored)):
        while batch := list(islice(same, max(1, max_tokens // read))):
            yield batch


class Score(NamedTuple):
    """The loss of a model on a text, or the reason why it has no figure."""

    length: int  # context length: maximum tokens in a window
    stride: int  # tokens of a window that are predicted
    tokens: int  # predicted tokens of all windows
    loss: float | None  # bits per token; None if there is no figure
    seconds: float  # time of scoring
    refusal: str  # reason why there is no figure; else empty
    windows: list[float]  # perplexity of each window; files have them with `--windows` alone

    @property
    def perplexity(self) -> float | None:
        """Perplexity per token."""
        return None if self.loss is None else 2.0**self.loss


@torch.no_grad()
def score_windows(
    model: PreTrainedModel,
    text: Tensor,
    windows: Iterable[TextWindow],
    length: int,
    stride: int,
    max_tokens: int,
    on_tokens: Callable[[int], object],
) -> Score:
    """Compute the mean loss of the predicted tokens of windows, and the perplexity of each window.

    Args:
        model: the model.
        text: ``(N + 1,)``, a beginning-of-text token (bos), then token i of the text at i + 1; so
            the first one is predicted like any other.
        windows: the windows of the text.
        length: maximum tokens in a window.
        stride: tokens of a window that are predicted.
        max_tokens: maximum tokens in a batch, unless a single window has more.
        on_tokens: called with the number of tokens that a batch predicts.
    """
    began = time.monotonic()
    text = text.to(model.device)
    log_likelihood = 0.0  # sum over all predicted tokens, in nats
    tokens = 0
    refusal = ""
    perplexities: list[float] = []
    try:
        limit = read_limit(model)  # None if its position encodings themselves refuse longer ones
        if limit is not None and length > limit:
            raise UserError(f"a length of {length} is more than the model's limit of {limit}")
        for module in model.modules():  # encodings of `set_positions`; a stock model has none
            if isinstance(module, Encoding):
                module.make_room(length)  # raises a UserError if it cannot read this many tokens
        for batch in batch_windows(windows, max_tokens):
            inputs = torch.stack([text[w.start : w.end] for w in batch])  # [B, T]
            targets = torch.stack([text[w.scored + 1 : w.end + 1] for w in batch])  # [B, n]
            log_probs = _predict(model, inputs, targets).double()  # [B, n]
            log_likelihood += float(log_probs.sum())
            tokens += log_probs.numel()
            perplexities += log_probs.mean(1).neg().exp().tolist()
            on_tokens(log_probs.numel())
    except UserError as error:  # that the model cannot read such a long window is a result
        refusal = str(error)
    loss = -log_likelihood / max(1, tokens) / math.log(2)  # 0 after a refusal at the start
    if not refusal and not (loss < _MAX_BITS and math.isfinite(sum(perplexities))):  # or NaN
        refusal = "the perplexity, or that of a window, is not finite: JSON has no such numbers"
    seconds = time.monotonic() - began
    return Score(length, stride, tokens, None if refusal else loss, seconds, refusal, perplexities)


def _predict(model: PreTrainedModel, tokens: Tensor, targets: Tensor) -> Tensor:
    """Compute log probabilities of targets, ``(B, n)``, which follow the last n of ``(B, T)``."""
    count = targets.size(1)
    can_select = "logits_to_keep" in inspect.signature(model.forward).parameters  # saves memory
    options = {"logits_to_keep": count} if can_select else {}
    logits = model(input_ids=tokens, use_cache=False, **options).logits[:, -count:]  # [B, n, V]
    parts = zip(*(x.split(_TOKENS_AT_A_TIME) for x in (logits.flatten(0, 1), targets.flatten())))
    losses = [F.cross_entropy(part.float(), ids, reduction="none") for part, ids in parts]
    return -torch.cat(losses).view_as(targets)
