"""Trained models for pictures: their stacks, and what their attention does. Brings fairseq."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

import torch
from fairseq.models import FairseqEncoderDecoderModel
from torch import Tensor

from fairseq_posenc.errors import UserError
from fairseq_posenc.transformer.capture_attention import CapturedAttention, capture_attention
from fairseq_posenc.workbench.loading.open_model import open_model
from fairseq_posenc.workbench.plots.model_inputs import read_text
from fairseq_posenc.workbench.plots.quantize import group_by_kind
from fairseq_posenc.workbench.plots.stacks import Stack, of_model

_SENTENCES, _SEED = 16, 1
_SPECIAL = 4  # symbols at the beginning of a dictionary that no text has


class Seen(NamedTuple):
    """The attention of one kind, of all layers, to a text.

    Attributes:
        kind: ``encoder``, ``decoder`` or ``cross``.
        layers: what they did.
        queries: the tokens that attend.
        keys: the tokens that are attended to.
    """

    kind: str
    layers: list[CapturedAttention]
    queries: list[str]
    keys: list[str]


def open_stack(path: Path, data: Optional[Path], wanted: Optional[str]) -> tuple[Stack, Any]:
    """Return a stack of a checkpoint, and the model that it is a part of.

    Args:
        path: the checkpoint.
        data: folder with its dictionaries; None for the one that it was trained on.
        wanted: ``encoder`` or ``decoder``; None for the first that there is.

    Raises:
        UserError: no such checkpoint or stack, or a model without positions of ours.
    """
    model = open_model(path, data).model
    stacks = of_model(model)
    if not stacks:
        raise UserError(
            f"--checkpoint {path}: a model of fairseq's own, of which only its attention to a text "
            "can be shown"
        )
    return stacks[_chosen(path, list(stacks), wanted)], model


def attention_to_text(
    path: Path, data: Optional[Path], text: str, target: Optional[str], wanted: Optional[str]
) -> Seen:
    """Return what the attention of a checkpoint does with a text.

    Args:
        path: the checkpoint.
        data: folder with its dictionaries; None for the one that it was trained on.
        text: what it reads.
        target: the translation; None for the model's own.
        wanted: ``encoder``, ``decoder`` or ``cross``; None for the first that there is.

    Raises:
        UserError: no such checkpoint or attention, or a text that the model cannot read.
    """
    opened = open_model(path, data)
    reading = read_text(opened, text, target)
    kinds = group_by_kind(capture_attention(opened.model, reading.run))
    kind = _chosen(path, list(kinds), wanted)
    queries, keys = ("decoder", "encoder") if kind == "cross" else (kind, kind)
    return Seen(kind, kinds[kind], reading.labels[queries], reading.labels[keys])


def attention_to_random_symbols(model: Any, length: int) -> list[CapturedAttention]:
    """Return what attention does in a model that reads random symbols, always the same.

    Args:
        model: of any family, with positions of ours, in evaluation mode.
        length: of the sentences, which are no longer than the model's shortest table.
    """
    generator = torch.Generator().manual_seed(_SEED)
    length = min([length, *(stack.max_positions for stack in of_model(model).values())])

    def drawn(embeddings: Any) -> Tensor:
        size = (_SENTENCES, length)
        return torch.randint(_SPECIAL, embeddings.num_embeddings, size, generator=generator)

    if isinstance(model, FairseqEncoderDecoderModel):
        source, target = drawn(model.encoder.embed_tokens), drawn(model.decoder.embed_tokens)
        lengths = torch.full((_SENTENCES,), length)
        return capture_attention(model, lambda: model(source, lengths, target))
    named = dict(model.named_modules())
    tokens = drawn(next(named[name] for name in named if name.endswith("embed_tokens")))
    return capture_attention(model, lambda: model(tokens))


def _chosen(path: Path, there: Sequence[str], wanted: Optional[str]) -> str:
    if wanted and wanted not in there:
        raise UserError(f"--stack {wanted}: --checkpoint {path} has {' and '.join(there)} only")
    return wanted or there[0]
