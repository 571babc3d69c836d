"""Compares the scores of two models on random sentences; exports and ``swap`` check themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fairseq_posenc.workbench.loading.families import list_stacks
from fairseq_posenc.workbench.loading.open_model import OpenModel

ALLOWED = 1e-5  # largest difference, relative to the largest number, in float32
LONGEST = 512  # tokens of a sentence
Compute = Callable[..., Tensor]  # computes scores from the tokens of the stacks, source first


def draw_sentences(model: Any, side: str) -> list[Tensor]:
    """Draw three padded sentences for each stack of a model, ``(3, T)``.

    Args:
        model: the model; T is its number of positions, at most ``LONGEST``.
        side: side of the padding, ``left`` or ``right``.
    """
    generator = torch.Generator().manual_seed(1)
    drawn = []
    for _, stack in list_stacks(model):
        longest = min(LONGEST, stack.assembly.dims.max_positions)
        symbols = stack.embed_tokens.num_embeddings
        tokens = torch.randint(4, symbols, (3, longest), generator=generator)
        tokens[:, 0], tokens[:, -1] = 0, stack.eos_idx
        tokens[:, longest // 2] = stack.eos_idx  # the end of a sentence in a block
        for row, length in enumerate((longest, longest // 2 + 1, min(3, longest))):
            keep = slice(length, None) if side == "right" else slice(None, longest - length)
            tokens[row, keep] = stack.padding_idx
        drawn.append(tokens)
    return drawn


def compute_scores(model: Any, *tokens: Tensor) -> Tensor:
    """Compute the scores ``(B, T, symbols)`` of a fairseq model of any family."""
    if len(tokens) == 1:
        return model(tokens[0])[0]
    source, target = tokens
    padding = model.encoder.padding_idx
    return model(source, source.ne(padding).sum(1), target)[0]


def compute_outputs(trained: OpenModel, *tokens: Tensor) -> Tensor:
    """Compute the scores of the fairseq model, ``(B, T, ...)``, or ``(B, classes)``."""
    model = trained.model
    if trained.head == "spans":
        return torch.stack(model(tokens[0], span_scores=True), -1)
    if trained.head == "classes":
        (name,) = model.classification_heads
        return model(tokens[0], features_only=True, classification_head_name=name)[0]
    return compute_scores(model, *tokens)


@torch.no_grad()
def largest_difference(
    model: Any, ours: Compute, theirs: Compute, of_classes: bool = False, graph: bool = False
) -> float:
    """Compute the largest difference of two models, relative to the largest number.

    Args:
        model: the fairseq model for which sentences are drawn, padded on the right and on the left.
        ours: computes the numbers of this model; those of padding are not compared.
        theirs: computes the numbers of the other model.
        of_classes: whether the numbers belong to sentences and come from their first token; then
            padding is only on the right.
        graph: whether the other model is a graph of the first stack, which is also tried on a
            smaller batch of shorter sentences.
    """
    differences = []
    for side in ("right",) if of_classes else ("right", "left"):
        batches = [draw_sentences(model, side)]
        if graph:
            whole, *_ = batches[0]
            half = whole.size(1) // 2
            batches = [[whole], [whole[:2, :half] if side == "right" else whole[:2, -half:]]]
        for tokens in batches:
            our_numbers, their_numbers = ours(*tokens), theirs(*tokens)
            if not of_classes:
                real = tokens[-1].ne(list_stacks(model)[len(tokens) - 1][1].padding_idx)
                our_numbers, their_numbers = our_numbers[real], their_numbers[real]
            distance = (our_numbers - their_numbers).abs().max()
            differences.append(float(distance / our_numbers.abs().max()))
    return max(differences)
