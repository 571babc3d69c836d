"""Opens trained models for pictures, and captures their attention; imports fairseq."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from fairseq.models import FairseqEncoderDecoderModel
from torch import Tensor

from fairseq_posenc.analysis.split import CapturedAttention
from fairseq_posenc.errors import UserError
from fairseq_posenc.transformer.capture_attention import capture_attention
from fairseq_posenc.workbench.loading.open_model import open_model
from fairseq_posenc.workbench.plots.attention import Maps
from fairseq_posenc.workbench.plots.model_inputs import read_text
from fairseq_posenc.workbench.plots.quantize import group_by_kind
from fairseq_posenc.workbench.plots.stacks import PlottedStack, collect_trained_stacks

_SENTENCES, _SEED = 16, 1
_SPECIAL = 4  # special symbols at the beginning of a dictionary


def open_stack(path: Path, data: Path | None, wanted: str | None) -> tuple[PlottedStack, Any]:
    """Open a stack of a checkpoint, by default its first; return it with its model.

    Raises:
        UserError: no such checkpoint or stack, or a stock model of fairseq.
    """
    model = open_model(path, data).model
    stacks = collect_trained_stacks(model)
    if not stacks:
        raise UserError(
            f"--checkpoint {path}: fairseq's own model; only its attention to a text can be shown"
        )
    return stacks[_choose_stack(path, list(stacks), wanted)], model


def attention_to_text(
    path: Path, data: Path | None, text: str, target: str | None, wanted: str | None
) -> tuple[str, Maps]:
    """Capture the attention of a checkpoint to a text, of the ``wanted`` kind or the first.

    Returns:
        The kind (``encoder``, ``decoder`` or ``cross``) and the maps of all its layers and heads.

    See :func:`read_text` for ``text`` and ``target``.

    Raises:
        UserError: no such checkpoint or attention, or a text that the model cannot read.
    """
    opened = open_model(path, data)
    reading = read_text(opened, text, target)
    kinds = group_by_kind(capture_attention(opened.model, reading.run))
    kind = _choose_stack(path, list(kinds), wanted)
    queries, keys = ("decoder", "encoder") if kind == "cross" else (kind, kind)
    return kind, Maps.of_stack(kinds[kind], reading.labels[queries], reading.labels[keys])


def attention_to_random_symbols(model: Any, length: int) -> list[CapturedAttention]:
    """Capture the attention of a model to random sentences, always the same ones.

    They have ``length`` tokens, or as many as the model's shortest table.
    """
    generator = torch.Generator().manual_seed(_SEED)
    stacks = collect_trained_stacks(model).values()
    length = min([length, *(stack.dims.max_positions for stack in stacks)])

    def draw_tokens(embeddings: Any) -> Tensor:
        size = (_SENTENCES, length)
        return torch.randint(_SPECIAL, embeddings.num_embeddings, size, generator=generator)

    if isinstance(model, FairseqEncoderDecoderModel):
        source = draw_tokens(model.encoder.embed_tokens)
        target = draw_tokens(model.decoder.embed_tokens)
        lengths = torch.full((_SENTENCES,), length)
        return capture_attention(model, lambda: model(source, lengths, target))
    named = dict(model.named_modules())
    tokens = draw_tokens(next(named[name] for name in named if name.endswith("embed_tokens")))
    return capture_attention(model, lambda: model(tokens))


def _choose_stack(path: Path, stacks: Sequence[str], wanted: str | None) -> str:
    if wanted and wanted not in stacks:
        raise UserError(f"--stack {wanted}: --checkpoint {path} has {' and '.join(stacks)} only")
    return wanted or stacks[0]
