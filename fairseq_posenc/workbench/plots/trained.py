"""Opens trained models of fairseq, and captures their attention for ``plot`` and ``inspect``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fairseq.models import FairseqEncoderDecoderModel
from torch import Tensor

from fairseq_posenc.analysis.split import CapturedAttention
from fairseq_posenc.errors import UserError
from fairseq_posenc.folders import checksum
from fairseq_posenc.transformer.capture_attention import capture_attention
from fairseq_posenc.workbench.loading.open_model import OpenModel, open_model
from fairseq_posenc.workbench.plots.inspection import (
    STACKS,
    Facts,
    Inspection,
    group_by_kind,
    refuse_large_page,
)
from fairseq_posenc.workbench.plots.model_inputs import ModelInput, prepare_input
from fairseq_posenc.workbench.plots.subject import Subject, collect_trained_subjects

_SENTENCES = 16  # random sentences that a model reads
_SEED = 1
_SPECIAL_SYMBOLS = 4  # at the beginning of a dictionary


class ReadText(NamedTuple):
    """The attention of a model to a text."""

    kind: str  # `encoder`, `decoder` or `cross`
    layers: list[CapturedAttention]
    queries: list[str]  # text of each token that attends
    keys: list[str]  # text of each token attended to


def open_subject(path: Path, data: Path | None, stack: str | None) -> Subject:
    """Open a stack of a checkpoint, by default its first, to show all its layers and heads.

    Raises:
        UserError: the checkpoint or the stack does not exist, or it is a stock model of fairseq.
    """
    subjects = collect_trained_subjects(open_model(path, data).model)
    if not subjects:
        raise UserError(
            f"--checkpoint {path}: fairseq's own model; only its attention to a text can be shown"
        )
    return subjects[_choose_stack(path, list(subjects), stack)]


def read_text(
    path: Path, data: Path | None, text: str, target: str | None, stack: str | None
) -> ReadText:
    """Capture the attention of a checkpoint to a text and its translation ``target``.

    ``data`` is the folder of the dictionaries, by default that of the training; ``stack`` is the
    kind of attention, by default the model's first.

    Raises:
        UserError: the checkpoint or the kind does not exist, or the model cannot read the text.
    """
    opened = open_model(path, data)
    prepared = prepare_input(opened, text, target)
    by_kind = group_by_kind(capture_attention(opened.model, prepared.run))
    kind = _choose_stack(path, list(by_kind), stack)
    queries, keys = STACKS[kind]
    return ReadText(kind, by_kind[kind], prepared.labels[queries], prepared.labels[keys])


def attention_to_random_symbols(model: Any, length: int) -> list[CapturedAttention]:
    """Capture the attention of a model to random sentences from a fixed seed.

    They have ``length`` tokens, or as many as the model's shortest table has rows.
    """
    generator = torch.Generator().manual_seed(_SEED)
    subjects = collect_trained_subjects(model).values()
    length = min([length, *(subject.dims.max_positions for subject in subjects)])

    def draw_tokens(embeddings: Any) -> Tensor:
        size = (_SENTENCES, length)
        return torch.randint(_SPECIAL_SYMBOLS, embeddings.num_embeddings, size, generator=generator)

    if isinstance(model, FairseqEncoderDecoderModel):
        source = draw_tokens(model.encoder.embed_tokens)
        target = draw_tokens(model.decoder.embed_tokens)
        lengths = torch.full((_SENTENCES,), length)
        return capture_attention(model, lambda: model(source, lengths, target))
    tables = (part for name, part in model.named_modules() if name.endswith("embed_tokens"))
    tokens = draw_tokens(next(tables))
    return capture_attention(model, lambda: model(tokens))


def inspect_model(opened: OpenModel, prepared: ModelInput) -> Inspection:
    """Run a model on a text, and collect its quantized attention.

    Raises:
        UserError: the page would be too large, the text is too long for the model, or its
            attention is NaN or infinite.
    """
    heads = 0
    for stack in opened.stacks.values():
        first = stack.layers[0]
        kinds = 2 if getattr(first, "encoder_attn", None) else 1  # of attention in a layer
        heads += len(stack.layers) * kinds * first.self_attn.num_heads
    refuse_large_page(opened.path, heads, prepared.labels)
    captured = capture_attention(opened.model, prepared.run)
    facts = Facts(opened.path, checksum(opened.path), opened.family.title, opened.positions)
    return Inspection.build(facts, captured, prepared.labels)


def _choose_stack(path: Path, stacks: Sequence[str], name: str | None) -> str:
    if name and name not in stacks:
        raise UserError(f"--stack {name}: --checkpoint {path} has {' and '.join(stacks)} only")
    return name or stacks[0]
