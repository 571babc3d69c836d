"""Random sentences on which two models are compared."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fairseq_posenc.workbench.loading.families import stacks_of

ALLOWED = 1e-5  # relative to the largest score, in float32
_LONGEST = 512


def sentences(model: Any, side: str) -> list[Tensor]:
    """Draw sentences for each stack of a model, ``(3, T)``, the longest as long as may be.

    Padding is on a ``side``, ``left`` or ``right``.
    """
    generator = torch.Generator().manual_seed(1)
    made = []
    for _, stack in stacks_of(model):
        longest = min(_LONGEST, stack.assembly.dims.max_positions)
        symbols = stack.embed_tokens.num_embeddings
        tokens = torch.randint(4, symbols, (3, longest), generator=generator)
        tokens[:, 0], tokens[:, -1] = 0, stack.eos_idx
        tokens[:, longest // 2] = stack.eos_idx  # the end of a sentence in a block
        for row, length in enumerate((longest, longest // 2 + 1, min(3, longest))):
            keep = slice(length, None) if side == "right" else slice(None, longest - length)
            tokens[row, keep] = stack.padding_idx
        made.append(tokens)
    return made


def scores(model: Any, *tokens: Tensor) -> Tensor:
    """Compute the scores of symbols, ``(B, T, symbols)``, with a model of any family."""
    if len(tokens) == 1:
        return model(tokens[0])[0]
    source, target = tokens
    padding = model.encoder.padding_idx
    return model(source, source.ne(padding).sum(1), target)[0]


def relative(ours: Tensor, theirs: Tensor) -> float:
    """Compute the largest difference of scores, in parts of the largest one."""
    return float((ours - theirs).abs().max() / ours.abs().max())


@torch.no_grad()
def largest_difference(one: Any, other: Any) -> float:
    """Compute the largest difference of two models' scores, in parts of the largest one.

    Scores of padding are not compared. Both models are taken to float32 and to evaluation.
    """
    one, other = one.float().eval(), other.float().eval()
    found = []
    for side in ("right", "left"):
        tokens = sentences(one, side)
        padding = stacks_of(one)[-1][1].padding_idx
        real = tokens[-1].ne(padding)
        found.append(relative(*(scores(model, *tokens)[real] for model in (one, other))))
    return max(found)
