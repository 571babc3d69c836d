"""Compares two models on random sentences, by which exports and ``swap`` check their results.

The difference of two models is relative: 1e-6 is a millionth of the largest number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from fairseq.data import Dictionary
from torch import Tensor

from fairseq_posenc.workbench.loading.families import list_stacks
from fairseq_posenc.workbench.loading.open_model import OpenModel

TOLERANCE = 1e-5  # largest difference that rounding in float32 explains
MAX_TOKENS = 512  # of a sentence
_BOS = Dictionary().bos()  # `<s>`
SPECIAL_SYMBOLS = Dictionary().nspecial  # symbols of every dictionary before those of the text
ComputeScores = Callable[..., Tensor]  # computes scores from the tokens of each stack, source first


def draw_sentences(model: Any, side: str) -> list[Tensor]:
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
            tokens[row, padded] = stack.padding_idx
        drawn.append(tokens)
    return drawn


def compute_scores(model: Any, *tokens: Tensor) -> Tensor:
    """Compute the scores ``(B, T, symbols)`` of a fairseq model of any family."""
    if len(tokens) == 1:
        return model(tokens[0])[0]
    source, target = tokens
    lengths = source.ne(model.encoder.padding_idx).sum(1)
    return model(source, lengths, target)[0]


def compute_head_scores(trained: OpenModel, *tokens: Tensor) -> Tensor:
    """Compute the scores of a fairseq model's head: ``(B, T, ...)``, or ``(B, classes)``."""
    model = trained.model
    if trained.head == "spans":
        return torch.stack(model(tokens[0], span_scores=True), -1)
    if trained.head == "classes":
        (name,) = model.classification_heads
        return model(tokens[0], features_only=True, classification_head_name=name)[0]
    return compute_scores(model, *tokens)


def is_rounding(difference: float) -> bool:
    """Check whether rounding explains a difference; it does not explain NaN."""
    return difference <= TOLERANCE


@torch.no_grad()
def largest_difference(
    model: Any,
    ours: ComputeScores,
    theirs: ComputeScores,
    of_classes: bool = False,
    graph: bool = False,
) -> float:
    """Compute the largest difference of two models; NaN if one of their numbers is NaN.

    Args:
        model: the fairseq model for which sentences are drawn, padded on the right and on the left.
        ours: computes the numbers of this model; those of padding are not compared.
        theirs: computes the numbers of the other model.
        of_classes: whether the numbers belong to sentences and come from their first token; then
            padding is only on the right.
        graph: whether the other model is an exported graph, which takes only the tokens of the
            first stack, and must also serve a smaller batch of shorter sentences.
    """
    stacks = [stack for _, stack in list_stacks(model)]
    differences = []
    for side in ("right",) if of_classes else ("right", "left"):
        batches = [draw_sentences(model, side)]
        if graph:
            first, *_ = batches[0]
            half = first.size(1) // 2
            batches = [[first], [first[:2, :half] if side == "right" else first[:2, -half:]]]
        for tokens in batches:
            our_numbers, their_numbers = ours(*tokens), theirs(*tokens)
            if not of_classes:
                scored = stacks[0] if graph else stacks[-1]  # the stack whose tokens have scores
                real = tokens[-1].ne(scored.padding_idx)
                our_numbers, their_numbers = our_numbers[real], their_numbers[real]
            difference = (our_numbers - their_numbers).abs().max()
            differences.append(difference / our_numbers.abs().max())
    return float(torch.stack(differences).max())
