"""Captures the attention of a Hugging Face model to a text."""

import hashlib
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fairseq_posenc.errors import UserError
from fairseq_posenc.folders import checksum
from fairseq_posenc.hf import read_positions, set_positions
from fairseq_posenc.hf.families import find_family
from fairseq_posenc.hf.own_positions import count_positions
from fairseq_posenc.workbench.hf.capture_attention import capture_attention
from fairseq_posenc.workbench.hf.folders import check_ids, load_model, load_tokenizer, read_limit
from fairseq_posenc.workbench.plots.inspection import TextAttention, refuse_long_text

_MAX_TARGET = 200  # tokens of the model's own output, as in fairseq
# Files of weights: transformers loads the first of these kinds that a folder has.
_WEIGHTS = ("model.safetensors", "*.safetensors", "pytorch_model*.bin")


def read_with_folder(folder: Path, text: str, target: str | None = None) -> TextAttention:
    """Run the model of a folder on a text, and capture its attention.

    The decoder of an encoder-decoder reads the target or, without one, the model's own output for
    the text.

    Raises:
        UserError: the folder cannot be read, its positions are not supported, the model does not
            read text, or has no decoder for the target, or a text is too long.
    """
    model = load_model(folder, dtype=torch.float32).eval()
    positions = read_positions(model)
    has_two_stacks = model.config.is_encoder_decoder
    if model.main_input_name != "input_ids":
        raise UserError(f"{folder}: reads {model.main_input_name}, not text")
    if target is not None and not has_two_stacks:
        raise UserError(f"--target is for models with an encoder and a decoder, unlike {folder}")
    tokenizer = load_tokenizer(folder)
    inputs = dict(tokenizer(text, return_tensors="pt", return_token_type_ids=False))
    if not inputs["input_ids"].numel():
        raise UserError(f"--text: the tokenizer of {folder} finds no token in it")
    check_ids(folder, inputs["input_ids"], model)
    stacks = find_family(type(model.config)).find_stacks(model)  # type: ignore[union-attr]
    heads = [len(x.attentions) * x.num_heads for x in stacks]  # weights of all heads are kept
    refuse_long_text(str(folder), inputs["input_ids"].size(1), read_limit(model), heads[0])
    ids = {"encoder": inputs["input_ids"]}  # by stack, `(1, T)`
    if has_two_stacks:
        ids["decoder"] = _read_target(folder, model, tokenizer, inputs, target)
        refuse_long_text(str(folder), ids["decoder"].size(1), read_limit(model), heads[-1])
        check_ids(folder, ids["decoder"], model)
        inputs["decoder_input_ids"] = ids["decoder"]
    labels = {stack: _label(tokenizer, tokens[0].tolist()) for stack, tokens in ids.items()}
    # `own` keeps the positions, but in modules of ours, which `capture_attention` reads.
    longest = max(map(len, labels.values()))  # `read_limit` limits it only to a table's rows
    set_positions(model, "own", max_positions=max(count_positions(model), longest))
    captured = capture_attention(model, inputs)
    if not has_two_stacks and captured[0].stack == "decoder":  # of a causal LM, its only stack
        labels = {"decoder": labels["encoder"]}
    specs: dict[str, str | None] = dict.fromkeys(labels, positions)  # the same for both stacks
    found = (sorted(folder.glob(pattern)) for pattern in _WEIGHTS)
    sums = [checksum(path) for path in next(filter(None, found))]
    sha256 = sums[0] if len(sums) == 1 else hashlib.sha256("".join(sums).encode()).hexdigest()
    return TextAttention(folder, sha256, type(model).__name__, specs, labels, captured)


def _read_target(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    inputs: dict[str, Tensor],
    target: str | None,
) -> Tensor:
    """Build the input of a decoder, ``(1, T)``: its start, and the target without its end."""
    start = model.generation_config.decoder_start_token_id
    if target is None:
        # transformers stops after 20 tokens, or after a number that the folder states.
        limits = {"max_length": min(_MAX_TARGET, count_positions(model)), "max_new_tokens": None}
        tokens = model.generate(**inputs, do_sample=False, **limits)[0].tolist()
    elif start is None:
        raise UserError(f"{folder}: its generation_config.json has no decoder_start_token_id")
    else:
        tokens = [start, *tokenizer(text_target=target)["input_ids"]]
    if len(tokens) > 1 and tokens[-1] == tokenizer.eos_token_id:  # the end is only predicted
        tokens.pop()
    return torch.tensor([tokens])


def _label(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> list[str]:
    """Label each token with its text; byte-level tokens are not readable themselves."""
    names = tokenizer.convert_ids_to_tokens(tokens)
    return [tokenizer.decode([x]).strip() or name for x, name in zip(tokens, names)]
