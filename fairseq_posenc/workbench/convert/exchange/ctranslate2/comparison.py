"""What CTranslate2 computes of a folder, compared with the model that it is of."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import ctranslate2
import torch
from torch import Tensor

from fairseq_posenc.workbench.convert.random_comparison import scores
from fairseq_posenc.workbench.loading.open_model import OpenModel

_LONGEST = 512


class LogProbDifference(NamedTuple):
    """How far apart the log probabilities of two models are.

    Attributes:
        largest: of all symbols, in parts of the largest log probability.
        mean: of all symbols, in nats.
    """

    largest: float
    mean: float


@torch.no_grad()
def difference(
    trained: OpenModel, folder: Path, vocabularies: list[list[str]]
) -> LogProbDifference:
    """Compare the log probabilities of random sentences of three lengths, one batch in CTranslate2.

    Args:
        trained: the model in fairseq.
        folder: as CTranslate2 reads it.
        vocabularies: the symbols of each dictionary, by their numbers.
    """
    sides = [_sentences(stack) for stack in trained.stacks.values()]
    written = [
        [[symbols[number] for number in sentence] for sentence in sentences]
        for symbols, sentences in zip((vocabularies[0], vocabularies[-1]), sides)
    ]
    place, end = str(folder), trained.stacks["decoder"].eos_idx
    if trained.family.name == "translation":
        translator = ctranslate2.Translator(place, inter_threads=1, intra_threads=1)
        found = translator.score_batch(*written, max_input_length=0)
    else:
        generator = ctranslate2.Generator(place, inter_threads=1, intra_threads=1)
        symbol = vocabularies[0][end]
        lines = [[symbol, *sentence, symbol] for sentence in written[0]]
        found = generator.score_batch(lines, max_input_length=0)
    theirs = torch.cat([torch.tensor(each.log_probs) for each in found])
    ours = torch.cat([_log_probabilities(trained, end, *sentence) for sentence in zip(*sides)])
    apart = (ours - theirs).abs()
    return LogProbDifference(float(apart.max() / ours.abs().max()), float(apart.mean()))


def _sentences(stack: object) -> list[list[int]]:
    """Draw sentences without their ends, the longest as long as may be."""
    dims, generator = stack.assembly.dims, torch.Generator().manual_seed(1)  # type: ignore[attr-defined]
    symbols: int = stack.embed_tokens.num_embeddings  # type: ignore[attr-defined]
    longest = min(_LONGEST, dims.max_positions) - 1
    return [
        torch.randint(4, symbols, (length,), generator=generator).tolist()
        for length in (longest, longest // 2 + 1, 2)
    ]


def _log_probabilities(trained: OpenModel, end: int, *sentence: list[int]) -> Tensor:
    """Compute the log probabilities of a sentence's symbols, its end among them."""
    *source, target = sentence
    given = [torch.tensor([[*source[0], end]])] if source else []
    found = scores(trained.model, *given, torch.tensor([[end, *target]])).log_softmax(-1)[0]
    return found.gather(1, torch.tensor([*target, end])[:, None])[:, 0]
