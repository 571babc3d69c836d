"""Explains in one line why a training diverged: update, layer, encoding and largest score.

The hook for exceptions (:mod:`~fairseq_posenc.host.startup`) prints it.
"""

import math
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fairseq.trainer import Trainer
from torch import Tensor, nn

from fairseq_posenc.errors import chain
from fairseq_posenc.transformer.capture_attention import capture_attention
from fairseq_posenc.transformer.stacks import PositionalDecoder, PositionalEncoder

_STOPPED = re.compile(r"training stopped at update ([\d,]+): ")
_SENTENCES = 8  # of a batch are measured


class _LargestScore(NamedTuple):
    """The largest absolute score of an attention; layer and head are counted from 0."""

    stack: str
    layer: int
    head: int
    largest: float


def find_divergence(error: BaseException) -> FloatingPointError | None:
    """Find the error of fairseq's trainer behind ``error``, which may be of its search for NaN."""
    return next((link for link in chain(error) if isinstance(link, FloatingPointError)), None)


def explain_divergence(error: BaseException) -> str | None:
    """Explain a :class:`FloatingPointError` of fairseq's trainer; None for any other error.

    The trainer, with model and batch, is still in the frames of the error's traceback.
    """
    if divergence := find_divergence(error):
        for frame, _ in traceback.walk_tb(divergence.__traceback__):
            trainer = frame.f_locals.get("self")
            samples = frame.f_locals.get("samples")
            if isinstance(trainer, Trainer) and samples:
                try:
                    measured = _describe_largest_score(trainer, samples)
                except RuntimeError:  # such as a lack of memory, which the training has filled
                    measured = ""
                return (
                    f"training stopped at update {trainer.get_num_updates() + 1:,}: {divergence}; "
                    f"{measured}the checkpoints in "
                    f"{Path(trainer.cfg.checkpoint.save_dir)}, except crash.pt, are from "
                    "before: continue from one of them with a smaller --lr, or with --clip-norm"
                )
    return None


def parse_stop_update(message: str) -> int:
    """Parse the update from a message of :func:`explain_divergence`; 0 for another message."""
    match = _STOPPED.search(message)
    return int(match[1].replace(",", "")) if match else 0


def _describe_largest_score(trainer: Trainer, samples: list[Any]) -> str:
    """Describe the largest score in the batch at which the training stopped."""
    model = trainer.get_model().eval()  # no training follows
    specs = {  # fairseq's own stacks have none
        "decoder" if isinstance(stack, PositionalDecoder) else "encoder": stack.assembly.spec
        for stack in model.modules()
        if isinstance(stack, (PositionalEncoder, PositionalDecoder))
    }
    measured: list[_LargestScore] = []
    for sample in samples:
        prepared, _ = trainer._prepare_sample(sample)
        for sentence in _split_sentences(prepared["net_input"]):
            measured += _measure_largest_scores(model, sentence)
    if not measured:
        return ""
    if broken := [score for score in measured if not math.isfinite(score.largest)]:
        stack, layer, head, _ = min(
            broken, key=lambda score: (score.stack == "decoder", score.layer)
        )
        phrase = "the first attention score that is not finite is"
    else:
        stack, layer, head, score = max(measured, key=lambda score: score.largest)
        phrase = f"the largest attention score is {score:.3g},"
    encoding = f" ({specs[stack]})" if stack in specs else ""
    return f"{phrase} in {stack} layer {layer + 1}, head {head + 1}{encoding}; "


def _measure_largest_scores(model: nn.Module, sentence: dict[str, Any]) -> Iterator[_LargestScore]:
    """Yield the largest score of each attention for a sentence."""
    for attention in capture_attention(model, lambda: model(**sentence)):
        by_head = attention.split.scores.abs().amax((0, 2, 3))  # [B, H, T, S] -> [H]
        score, head = by_head.max(0)  # NaN counts as the largest
        yield _LargestScore(attention.stack, attention.layer, int(head), float(score))


def _split_sentences(inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the first sentences of a batch, each as a batch of its own."""
    size = min(len(x) for x in inputs.values() if isinstance(x, Tensor))
    for i in range(min(size, _SENTENCES)):
        yield {k: x[i : i + 1] if isinstance(x, Tensor) else x for k, x in inputs.items()}
