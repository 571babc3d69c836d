"""Compares two models on random sentences, by which exports check their results.

The difference of two models is relative: 1e-6 is a millionth of the largest number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from fairseq.data import Dictionary
from torch import Tensor

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.loading.families import list_stacks

TOLERANCE = 1e-5  # largest difference that rounding in float32 explains
MAX_TOKENS = 512  # of a sentence
_BOS, _PADDING = Dictionary().bos(), Dictionary().pad()  # `<s>` and `<pad>`
SPECIAL_SYMBOLS = Dictionary().nspecial  # symbols of every dictionary before those of the text
ComputeScores = Callable[..., Tensor]  # computes scores from the tokens of each stack, source first


def draw_batches(model: Any) -> list[list[Tensor]]:
    """Draw a batch of sentences that are padded on the right, and one padded on the left."""
    return [_draw_batch(model, side) for side in ("right", "left")]


def draw_sentences(model: Any) -> list[list[list[int]]]:
    """Draw three sentences for each stack, without special symbols: ``[row][stack]``, as ids."""
    stacks = _draw_batch(model, "right")
    return [[ids[ids.ge(SPECIAL_SYMBOLS)].tolist() for ids in row] for row in zip(*stacks)]


def _draw_batch(model: Any, side: str) -> list[Tensor]:
    """Draw three sentences ``(3, T)`` for each stack of a model, padded ``left`` or ``right``.

    T is the stack's number of positions, at most ``MAX_TOKENS``.
    """
    generator = torch.Generator().manual_seed(1)
    drawn = []
    for _, stack in list_stacks(model):
        longest = min(MAX_TOKENS, stack.assembly.dims.max_positions)
        symbols = stack.embed_tokens.num_embeddings
        tokens = torch.randint(SPECIAL_SYMBOLS, symbols, (3, longest), generator=generator)
        tokens[:, 0] = _BOS
        tokens[:, -1] = stack.eos_idx
        middle = longest // 2
        tokens[:, middle] = stack.eos_idx  # a row may hold several sentences
        for row, length in enumerate((longest, middle + 1, min(3, longest))):
            padded = slice(length, None) if side == "right" else slice(None, longest - length)
            tokens[row, padded] = _PADDING
        drawn.append(tokens)
    return drawn


def compute_scores(model: Any, *tokens: Tensor) -> Tensor:
    """Compute the scores ``(B, T, symbols)`` of a fairseq model of any family."""
    if len(tokens) == 1:
        return model(tokens[0])[0]
    source, target = tokens
    lengths = source.ne(model.encoder.padding_idx).sum(1)
    return model(source, lengths, target)[0]


@torch.no_grad()
def compute_log_probs(model: Any, *sides: list[int]) -> Tensor:
    """Compute the log probabilities ``(T + 1,)`` of a sentence's T symbols and of its end.

    ``sides`` are the sentence, or a source and its translation. fairseq's decoders begin with the
    end.
    """
    end = model.decoder.eos_idx
    *sources, target = sides
    inputs = [torch.tensor([[*source, end]]) for source in sources]
    scores = compute_scores(model, *inputs, torch.tensor([[end, *target]]))[0]
    return scores.log_softmax(-1).gather(1, torch.tensor([*target, end])[:, None])[:, 0]


def compute_head_scores(model: Any, head: str, *tokens: Tensor) -> Tensor:
    """Compute the scores of a fairseq model's head: ``(B, T, ...)``, or ``(B, classes)``."""
    if head == "spans":
        return torch.stack(model(tokens[0], span_scores=True), -1)
    if head == "classes":
        (name,) = model.classification_heads
        return model(tokens[0], features_only=True, classification_head_name=name)[0]
    return compute_scores(model, *tokens)


def compute_hf_scores(model: Any, head: str, *tokens: Tensor) -> Tensor:
    """Compute the scores of a model of transformers, in the shape of the function above."""
    inputs: dict[str, Tensor] = {}
    for prefix, ids in zip(("", "decoder_"), tokens):
        inputs[f"{prefix}input_ids"] = ids
        inputs[f"{prefix}attention_mask"] = ids.ne(_PADDING).long()
    output = model(**inputs)
    if head == "spans":
        return torch.stack([output.start_logits, output.end_logits], -1)
    return output.logits


def compare_with_transformers(ours: Any, head: str, theirs: Any) -> float:
    """Compute how much a model of transformers differs from one of fairseq, as a share.

    Args:
        ours: the model of fairseq.
        head: its head: ``spans``, ``classes``, or the name of its family.
        theirs: the model of transformers.
    """
    batches = draw_batches(ours)
    by_token = head != "classes"
    if not by_token:  # their scores come from the first token: no padding before it
        batches = batches[:1]
    return largest_difference(
        batches,
        partial(compute_head_scores, ours, head),
        partial(compute_hf_scores, theirs, head),
        by_token,
    )


@torch.no_grad()
def largest_difference(
    batches: Iterable[Sequence[Tensor]],
    ours: ComputeScores,
    theirs: ComputeScores,
    by_token: bool = True,
) -> float:
    """Compute the largest difference of two models; NaN if one of their numbers is NaN.

    Args:
        batches: for each batch, the tokens of each stack.
        ours: computes the numbers of a fairseq model.
        theirs: computes the numbers of the other model.
        by_token: whether each token of the last stack has numbers, ``(B, T, ...)``; then those of
            padding are not compared.
    """
    differences = []
    for tokens in batches:
        our_numbers, their_numbers = ours(*tokens), theirs(*tokens)
        if by_token:
            real = tokens[-1].ne(_PADDING)
            our_numbers, their_numbers = our_numbers[real], their_numbers[real]
        difference = (our_numbers - their_numbers).abs().max()
        differences.append(difference / our_numbers.abs().max())
    return float(torch.stack(differences).max())


def is_rounding(difference: float) -> bool:
    """Check whether rounding explains a difference; it does not explain NaN."""
    return difference <= TOLERANCE


def refuse_difference(what_differs: str, difference: float) -> None:
    """Refuse a difference that is more than rounding; ``what_differs`` begins the message."""
    if not is_rounding(difference):
        raise UserError(
            f"{what_differs} by {difference:.1e} of the largest number, and {TOLERANCE:g} is "
            "rounding: nothing was written"
        )
