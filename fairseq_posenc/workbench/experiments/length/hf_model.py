"""Opens causal language models of transformers and the text that they read."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from fairseq_posenc.errors import UserError
from fairseq_posenc.hf import read_positions, set_positions
from fairseq_posenc.hf.folders import check_ids, load_model, load_tokenizer
from fairseq_posenc.hf.own_positions import read_limit, read_trained_length
from fairseq_posenc.workbench.experiments.length.stream import Stream
from fairseq_posenc.workbench.running.devices import ComputeOptions
from fairseq_posenc.workbench.running.files import find_model
from fairseq_posenc.workbench.running.options import parse_named

_TOKENS_OF_A_SAMPLE = 200  # number that is decoded to see whether a tokenizer keeps words apart
_TOKENS_AT_A_TIME = 1024  # losses of so many are computed together, to save memory


class NamedModel(NamedTuple):
    """A model that the user named."""

    name: str  # the user's name for it
    path: Path  # its folder
    spec_override: str | None = None  # replaces the positions that it has; None keeps them


class LoadedModel(NamedTuple):
    """A model that has been opened."""

    model: PreTrainedModel  # in eval mode, on its device
    encoding: str  # spec of its positions
    trained_length: int  # tokens in a training sample
    limit: int | None  # longest input; None if the position encodings themselves refuse it


def parse_models(texts: Sequence[str]) -> list[NamedModel]:
    """Parse ``NAME=FOLDER[@SPEC]``; models of Hugging Face's hub are downloaded.

    Raises:
        UserError: an argument is malformed, two models have the same name, or a folder does not
            exist.
    """
    form = "NAME=FOLDER or NAME=FOLDER@SPEC"
    return [_parse_model(*named) for named in parse_named(texts, form).items()]


def _parse_model(name: str, value: str) -> NamedModel:
    path, _, spec = value.rpartition("@")
    if not path or Path(value).exists():  # there is no spec; a path may contain "@"
        path, spec = value, ""
    folder = find_model(Path(path))
    if not (folder / "config.json").is_file():
        raise UserError(
            f"{name}: {path} is no folder of transformers; export a checkpoint of fairseq, or use "
            "fairseq-eval-lm --context-window"
        )
    return NamedModel(name, folder, spec or None)


def load(named: NamedModel, computing: ComputeOptions, longest: int) -> LoadedModel:
    """Open the model of a folder for texts of ``longest`` tokens, without running its code.

    Raises:
        UserError: it is not a causal language model, or cannot take the positions.
    """
    path = named.path
    model = load_model(path, dtype=torch.float32)
    if not model.can_generate() or model.config.is_encoder_decoder:
        raise UserError(
            f"{named.name}: {path} is a {type(model).__name__}; give a causal language model"
        )
    trained = read_trained_length(model)
    if named.spec_override is not None:
        set_positions(model, named.spec_override, max_positions=max(longest, trained))
    model = computing.place(model)
    return LoadedModel(
        model=model,
        encoding=read_positions(model),
        trained_length=trained,
        limit=read_limit(model),
    )


def predict(model: PreTrainedModel, tokens: Tensor, targets: Tensor) -> Tensor:
    """Compute log probabilities of targets, ``(B, n)``, which follow the last n of ``(B, T)``."""
    count = targets.size(1)
    options: dict[str, Any] = {}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:  # saves memory
        options["logits_to_keep"] = count
    logits = model(input_ids=tokens, use_cache=False, **options).logits[:, -count:]  # [B, n, V]
    logit_parts = logits.flatten(0, 1).split(_TOKENS_AT_A_TIME)
    target_parts = targets.flatten().split(_TOKENS_AT_A_TIME)
    losses = [
        F.cross_entropy(part.float(), part_targets, reduction="none")
        for part, part_targets in zip(logit_parts, target_parts)
    ]
    return -torch.cat(losses).view_as(targets)


def tokenize_text(path: Path, folder: Path, model: PreTrainedModel) -> Stream:
    """Tokenize a text with the tokenizer of a model's folder.

    Raises:
        UserError: the file cannot be read, is empty, or the folder has no tokenizer that keeps
            words apart and is the model's.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--text {path}: {error}") from error
    tokenizer = load_tokenizer(folder)
    tokens = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if not tokens:
        raise UserError(f"--text {path}: the file is empty; name a file with text in it")
    sample = tokenizer.decode(tokens[:_TOKENS_OF_A_SAMPLE]).strip()
    original = text.strip()[: len(sample)]
    # transformers 5.17 opens some folders with the wrong tokenizer class, which loses the spaces.
    if len(sample.split()) == 1 and len(original.split()) > 1:
        raise UserError(
            f"{folder}: transformers {transformers.__version__} reads its tokenizer wrongly: a "
            "text loses its spaces; install another version"
        )
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    first_token = eos if bos is None else bos
    if first_token is None:
        raise UserError(f"{folder}: its tokenizer has no token with which a text begins")
    stream = Stream.from_tokens(torch.tensor(tokens), first_token)
    check_ids(folder, torch.cat([stream.inputs[:1], stream.targets]), model)
    return stream
