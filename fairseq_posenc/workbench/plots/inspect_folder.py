"""Captures the attention of a Hugging Face model to a text, for the page of ``inspect``."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedModel

from fairseq_posenc.errors import UserError
from fairseq_posenc.hf import read_positions, set_positions
from fairseq_posenc.hf.capture_attention import capture_attention
from fairseq_posenc.hf.own_positions import count_positions
from fairseq_posenc.hf.saving import load_model
from fairseq_posenc.workbench.plots.inspection import Facts, Inspection, refuse_large
from fairseq_posenc.workbench.running.files import checksum


def inspect_folder(folder: Path, text: str) -> Inspection:
    """Run the model of a folder on a text, and collect its quantized attention.

    Raises:
        UserError: the folder cannot be read, its positions are not supported, it has both an
            encoder and a decoder, the text is too long, or attention is NaN or infinite.
    """
    model = load_model(folder, dtype=torch.float32).eval()
    positions = read_positions(model)
    if model.config.is_encoder_decoder:
        raise UserError(
            f"{folder}: has an encoder and a decoder; for Hugging Face models the page supports "
            "only one of them"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: has no tokenizer, which --text needs") from error
    inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
    tokens = inputs["input_ids"][0].tolist()
    if not tokens:
        raise UserError(f"--text: the tokenizer of {folder} finds no token in it")
    # Byte-level tokens are readable only when decoded.
    pieces = [tokenizer.decode([token]).strip() for token in tokens]
    labels = [piece or name for piece, name in zip(pieces, tokenizer.convert_ids_to_tokens(tokens))]
    _refuse_long(folder, model, len(tokens))
    set_positions(model, "own", max(len(tokens), count_positions(model)))
    config = model.config
    heads = config.num_hidden_layers * config.num_attention_heads
    refuse_large(folder, heads, {"text": labels})
    captured = capture_attention(model, dict(inputs))
    stack = captured[0].stack
    family = type(model).__name__
    facts = Facts(folder, _checksum_weights(folder), family, {stack: positions})
    return Inspection.build(facts, captured, {stack: labels})


def _refuse_long(folder: Path, model: PreTrainedModel, length: int) -> None:
    """Refuse a text that is longer than the model's table of positions."""
    limit = count_positions(model)
    if length > limit and "learned" in read_positions(model):
        raise UserError(
            f"{folder}: reads {limit} tokens, and the text has {length}; give a shorter one"
        )


def _checksum_weights(folder: Path) -> str:
    """Compute the SHA-256 checksum of a folder's weights; for several files, of their checksums."""
    files = sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".bin"))
    sums = [checksum(path) for path in files]
    return sums[0] if len(sums) == 1 else hashlib.sha256("".join(sums).encode()).hexdigest()
