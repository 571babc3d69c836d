"""Compares models on random sentences, as exports and imports do to check their results."""

from typing import Any

import torch
from fairseq.data import Dictionary
from torch import Tensor

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.loading.open_model import list_stacks

TOLERANCE = 1e-5  # largest difference that rounding explains, as a share of the largest number
_BOS, PADDING = Dictionary().bos(), Dictionary().pad()  # `<s>` and `<pad>`
FIRST_WORD = Dictionary().nspecial  # id of the first symbol after `<s>`, `<pad>` and the like


def draw_batch(model: Any, side: str, lengths: list[int] | None = None) -> list[Tensor]:
    """Draw three rows of tokens ``(3, T)`` for each stack of a model, padded ``left`` or ``right``.

    Rows have T, T // 2 + 1 and at most 3 tokens: T of ``lengths``, or all positions up to 512.
    """
    generator = torch.Generator().manual_seed(1)
    batch = []
    stacks = list_stacks(model).values()
    lengths = lengths or [min(512, stack.dims.max_positions) for stack in stacks]
    for stack, longest in zip(stacks, lengths):
        symbols = stack.embed_tokens.num_embeddings
        tokens = torch.randint(FIRST_WORD, symbols, (3, longest), generator=generator)
        middle = longest // 2
        tokens[:, 0] = _BOS
        tokens[:, [middle, -1]] = stack.eos_idx  # the first row has two sentences
        for row, length in enumerate((longest, middle + 1, min(3, longest))):
            padded = slice(length, None) if side == "right" else slice(None, longest - length)
            tokens[row, padded] = PADDING
        batch.append(tokens)
    return batch


def compute_scores(model: Any, head: str, *tokens: Tensor) -> Tensor:
    """Compute the scores of a fairseq model's head: ``(B, T, ...)``, or ``(B, classes)``.

    Args:
        model: the model.
        head: ``spans``, ``classes``, or the name of the model's family.
        tokens: ``(B, T)`` of each stack.
    """
    if head == "spans":
        return torch.stack(model(tokens[0], span_scores=True), -1)  # of starts and of ends, (B, T)
    if head == "classes":
        (name,) = model.classification_heads
        return model(tokens[0], features_only=True, classification_head_name=name)[0]
    if head == "translation":
        source, target = tokens
        return model(source, source.ne(PADDING).sum(1), target)[0]
    return model(tokens[0])[0]  # fairseq's models return scores, then other outputs


def compute_hf_scores(model: Any, head: str, *tokens: Tensor) -> Tensor:
    """Compute the scores of a transformers model, in the shape of :func:`compute_scores`."""
    inputs: dict[str, Tensor] = {}
    for prefix, ids in zip(("", "decoder_"), tokens):
        inputs[f"{prefix}input_ids"] = ids
        inputs[f"{prefix}attention_mask"] = ids.ne(PADDING).long()
    output = model(**inputs)
    if head == "spans":
        return torch.stack([output.start_logits, output.end_logits], -1)
    return output.logits


@torch.no_grad()
def compare_with_transformers(ours: Any, head: str, theirs: Any) -> float:
    """Compute the largest difference of two models' scores, as a share of the largest score.

    Scores of padding are not compared. If a score is NaN, so is the result.

    Args:
        ours: the fairseq model.
        head: its head, as in :func:`compute_scores`.
        theirs: the transformers model.
    """
    differences = []
    # Heads for classes read index 0, which padding on the left would occupy.
    for side in ("right",) if head == "classes" else ("right", "left"):
        tokens = draw_batch(ours, side)  # one tensor for each stack, the target's last
        our_scores = compute_scores(ours, head, *tokens)
        their_scores = compute_hf_scores(theirs, head, *tokens)
        if head != "classes":
            real = tokens[-1].ne(PADDING)
            our_scores, their_scores = our_scores[real], their_scores[real]
        differences.append((our_scores - their_scores).abs().max() / our_scores.abs().max())
    return float(torch.stack(differences).max())


def refuse_difference(what_differs: str, difference: float) -> None:
    """Refuse a difference, as a share of the largest number, that is more than rounding, or NaN."""
    if not difference <= TOLERANCE:  # `>` would be False for NaN
        share = f"{difference:.1e} of the largest number; rounding explains at most {TOLERANCE:g}"
        raise UserError(f"{what_differs} by {share}: nothing was written")
