"""An exported folder read back by transformers, and compared with the model that it is of."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from fairseq_posenc.errors import UserError
from fairseq_posenc.exchange.folder import CODE
from fairseq_posenc.exchange.trained import Trained

ALLOWED = 1e-5  # relative to the largest score, in float32
_LONGEST = 512


def read_back(folder: Path, architecture: str) -> Any:
    """Return the model of a folder.

    Args:
        folder: as it was written.
        architecture: its class, of transformers or of the code in the folder.

    Raises:
        UserError: a tensor is missing, left over or of another shape.
    """
    module: Any = transformers
    if (folder / CODE).is_file():
        name = f"_{folder.resolve().name}_{CODE.removesuffix('.py')}"
        spec = importlib.util.spec_from_file_location(name, folder / CODE)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # what it would warn of is refused here
    try:
        model, info = getattr(module, architecture).from_pretrained(
            folder, output_loading_info=True, ignore_mismatched_sizes=True
        )
    finally:
        transformers.logging.set_verbosity(verbosity)
    for what in ("missing", "unexpected", "mismatched"):
        if found := sorted(map(str, info[f"{what}_keys"])):
            raise UserError(
                f"{len(found)} {what} tensors, such as {found[0]}: the model is built with options "
                f"that {architecture} does not have"
            )
    return model.eval()


@torch.no_grad()
def largest_difference(trained: Trained, model: Any) -> float:
    """Return the largest difference of scores, in parts of the largest one.

    Args:
        trained: the model in fairseq.
        model: the exported one.

    Sentences of many lengths, padded on the right, and on the left where the head does not read the
    first token alone; scores of padding are not compared.
    """
    sides = ("right",) if trained.head == "classes" else ("right", "left")
    return max(_difference(trained, model, *_batch(trained, side)) for side in sides)


def _batch(trained: Trained, side: str) -> list[Tensor]:
    """Return random sentences for each stack, ``(B, T)``, the longest as long as may be."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for stack in trained.stacks.values():
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


def _difference(trained: Trained, model: Any, *tokens: Tensor) -> float:
    ours = _scores(trained, *tokens)
    names = ("input_ids", "decoder_input_ids")
    masks = {} if trained.family == "translation" else {"attention_mask": tokens[0].ne(1).long()}
    found = model(**dict(zip(names, tokens)), **masks)
    if trained.head == "spans":
        theirs = torch.stack([found.start_logits, found.end_logits], -1)
    else:
        theirs = found.logits
    if trained.head != "classes":
        real = tokens[-1].ne(trained.stacks[list(trained.stacks)[-1]].padding_idx)
        ours, theirs = ours[real], theirs[real]
    return float((ours - theirs).abs().max() / ours.abs().max())


def _scores(trained: Trained, *tokens: Tensor) -> Tensor:
    """Return fairseq's scores, ``(B, T, ...)``; of classes ``(B, classes)``."""
    model = trained.model
    if trained.head == "spans":
        return torch.stack(model(tokens[0], span_scores=True), -1)
    if trained.head == "classes":
        (name,) = model.classification_heads
        return model(tokens[0], features_only=True, classification_head_name=name)[0]
    if trained.family == "translation":
        return model(tokens[0], tokens[0].ne(1).sum(1), tokens[1])[0]
    return model(tokens[0])[0]
