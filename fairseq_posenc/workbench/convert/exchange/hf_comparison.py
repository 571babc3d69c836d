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
from fairseq_posenc.workbench.convert.exchange.hf_folder_writer import CODE
from fairseq_posenc.workbench.convert.random_comparison import relative, scores, sentences
from fairseq_posenc.workbench.loading.open_model import OpenModel


def read_back(folder: Path, architecture: str) -> Any:
    """Read the model of a written folder, of a class of transformers or of the code in the folder.

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
def largest_difference(trained: OpenModel, model: Any) -> float:
    """Compute the largest difference of an exported model's scores, in parts of the largest one.

    Sentences of many lengths, padded on the right, and on the left where the head does not read the
    first token alone; scores of padding are not compared.
    """
    sides = ("right",) if trained.head == "classes" else ("right", "left")
    return max(_difference(trained, model, *sentences(trained.model, side)) for side in sides)


def _difference(trained: OpenModel, model: Any, *tokens: Tensor) -> float:
    ours = outputs(trained, *tokens)
    names = ("input_ids", "decoder_input_ids")
    masks = {} if trained.head == "translation" else {"attention_mask": tokens[0].ne(1).long()}
    found = model(**dict(zip(names, tokens)), **masks)
    if trained.head == "spans":
        theirs = torch.stack([found.start_logits, found.end_logits], -1)
    else:
        theirs = found.logits
    if trained.head != "classes":
        real = tokens[-1].ne(trained.stacks[list(trained.stacks)[-1]].padding_idx)
        ours, theirs = ours[real], theirs[real]
    return relative(ours, theirs)


def outputs(trained: OpenModel, *tokens: Tensor) -> Tensor:
    """Compute fairseq's scores, ``(B, T, ...)``; of classes ``(B, classes)``."""
    model = trained.model
    if trained.head == "spans":
        return torch.stack(model(tokens[0], span_scores=True), -1)
    if trained.head == "classes":
        (name,) = model.classification_heads
        return model(tokens[0], features_only=True, classification_head_name=name)[0]
    return scores(model, *tokens)
