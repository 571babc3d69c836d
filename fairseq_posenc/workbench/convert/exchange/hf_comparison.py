"""Reads an exported folder back with transformers, and compares it with the original model."""

from __future__ import annotations

import importlib.util
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.convert.exchange.hf_folder_writer import CODE
from fairseq_posenc.workbench.convert.random_comparison import compute_scores, largest_difference
from fairseq_posenc.workbench.loading.open_model import OpenModel


def read_back(folder: Path, architecture: str) -> Any:
    """Load the model of a written folder, with a class of transformers or of the folder's code.

    Raises:
        UserError: a tensor is missing, unexpected, or of another shape.
    """
    module: Any = transformers
    if (folder / CODE).is_file():
        # A new module for each folder, registered because transformers looks it up.
        name = f"_{folder.resolve().name}_{CODE.removesuffix('.py')}"
        spec = importlib.util.spec_from_file_location(name, folder / CODE)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # its warnings are errors below
    try:
        model, info = getattr(module, architecture).from_pretrained(
            folder, output_loading_info=True, ignore_mismatched_sizes=True
        )
    finally:
        transformers.logging.set_verbosity(verbosity)
    for kind in ("missing", "unexpected", "mismatched"):
        if names := sorted(map(str, info[f"{kind}_keys"])):
            raise UserError(
                f"{len(names)} {kind} tensors, such as {names[0]}: the model is built with options "
                f"that {architecture} does not have"
            )
    return model.eval()


def compare_with_export(trained: OpenModel, model: Any) -> float:
    """Compute the largest difference of an exported model's scores, relative to the largest one."""

    def compute_theirs(*tokens: Tensor) -> Tensor:
        names = ("input_ids", "decoder_input_ids")
        masks = {} if trained.head == "translation" else {"attention_mask": tokens[0].ne(1).long()}
        output = model(**dict(zip(names, tokens)), **masks)
        if trained.head == "spans":
            return torch.stack([output.start_logits, output.end_logits], -1)
        return output.logits

    ours = partial(compute_outputs, trained)
    return largest_difference(trained.model, ours, compute_theirs, trained.head == "classes")


def compute_outputs(trained: OpenModel, *tokens: Tensor) -> Tensor:
    """Compute the scores of the fairseq model, ``(B, T, ...)``, or ``(B, classes)``."""
    model = trained.model
    if trained.head == "spans":
        return torch.stack(model(tokens[0], span_scores=True), -1)
    if trained.head == "classes":
        (name,) = model.classification_heads
        return model(tokens[0], features_only=True, classification_head_name=name)[0]
    return compute_scores(model, *tokens)
