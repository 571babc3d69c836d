"""Captures the attention of a fairseq checkpoint to a text, for the page of ``inspect``."""

from __future__ import annotations

from pathlib import Path

from fairseq_posenc.transformer.capture_attention import capture_attention
from fairseq_posenc.workbench.loading.open_model import OpenModel, open_model
from fairseq_posenc.workbench.plots.inspection import Facts, Inspection, refuse_large
from fairseq_posenc.workbench.plots.model_inputs import Reading, read_text
from fairseq_posenc.workbench.running.files import checksum


def inspect_checkpoint(path: Path, data: Path | None, text: str, target: str | None) -> Inspection:
    """Open a model and run it on a text; see :func:`inspect_model` and :func:`read_text`."""
    opened = open_model(path, data)
    return inspect_model(opened, read_text(opened, text, target))


def inspect_model(opened: OpenModel, reading: Reading) -> Inspection:
    """Run a model on a text, and collect its quantized attention.

    Raises:
        UserError: the page would be too large, the text is too long for the model, or its
            attention is NaN or infinite.
    """
    stacks = opened.stacks.values()
    heads = sum(len(stack.layers) * stack.layers[0].self_attn.num_heads for stack in stacks)
    refuse_large(opened.path, heads, reading.labels)
    captured = capture_attention(opened.model, reading.run)
    facts = Facts(opened.path, checksum(opened.path), opened.family.title, opened.positions)
    return Inspection.build(facts, captured, reading.labels)
