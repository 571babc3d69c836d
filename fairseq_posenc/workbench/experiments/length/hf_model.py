"""Opens transformers' causal language models, and tokenizes the text that they read."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from fairseq_posenc.errors import UserError
from fairseq_posenc.hf import set_positions
from fairseq_posenc.hf.own_positions import read_trained_length
from fairseq_posenc.workbench.hf.folders import check_folder, check_ids, load_model, load_tokenizer
from fairseq_posenc.workbench.running.devices import place
from fairseq_posenc.workbench.running.options import parse_named

_TOKENS_OF_A_SAMPLE = 200  # number that is decoded to see whether a tokenizer keeps words apart


class NamedModel(NamedTuple):
    """A model that the user named."""

    name: str  # the user's name for it; its folder of scores has the same
    path: Path  # its folder
    spec_override: str | None = None  # replaces the positions that it has; None keeps them


def parse_models(texts: Sequence[str], *files: str) -> list[NamedModel]:
    """Parse ``NAME=FOLDER[@SPEC]``, with names other than ``files``, and look at each folder.

    Raises:
        UserError: an argument is malformed, a name occurs twice, or a folder cannot be used.
    """
    models = []
    for name, value in parse_named(texts, "NAME=FOLDER[@SPEC]", *files).items():
        path, spec = value, None
        if "@" in value and not Path(value).exists():  # a path may contain "@"
            path, _, spec = value.rpartition("@")
        advice = "; export a fairseq checkpoint, or use fairseq-eval-lm --context-window"
        check_folder(Path(path), f"{name}: ", advice)  # refuses code, links, damaged files
        models.append(NamedModel(name, Path(path), spec))
    return models


def load(named: NamedModel, dtype: torch.dtype, longest: int) -> PreTrainedModel:
    """Open the model of a folder for texts of ``longest`` tokens, without running its code.

    Raises:
        UserError: it is not a causal language model, or cannot take the positions.
    """
    model = load_model(named.path, dtype=torch.float32)  # whatever its files have; `place` rounds
    if not model.can_generate() or model.config.is_encoder_decoder:
        what = f"{named.path} is a {type(model).__name__}"
        raise UserError(f"{named.name}: {what}; give a causal language model")
    if named.spec_override is not None:
        longest = max(longest, read_trained_length(model))  # no table loses rows
        set_positions(model, named.spec_override, max_positions=longest)
    return place(model, dtype)  # on the GPU, if there is one


def tokenize_text(text: str, folder: Path, model: PreTrainedModel) -> Tensor:
    """Tokenize a text with the tokenizer of a model's folder.

    Returns:
        A beginning-of-text token (bos, or else eos), then the tokens of the text, ``(N + 1,)``.

    Raises:
        UserError: the folder has no tokenizer that keeps words apart and is the model's.
    """
    tokenizer = load_tokenizer(folder)
    tokens = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    sample = tokenizer.decode(tokens[:_TOKENS_OF_A_SAMPLE]).strip()
    original = text.strip()[: len(sample)]
    # Some versions of transformers open some folders by a tokenizer class that loses the spaces.
    if len(sample.split()) == 1 and len(original.split()) > 1:
        who = f"transformers {transformers.__version__} reads its tokenizer wrongly"
        raise UserError(f"{folder}: {who}: a text loses its spaces; install another version")
    first_id = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    if first_id is None:
        raise UserError(f"{folder}: its tokenizer has no beginning-of-text token (bos, eos)")
    ids = torch.tensor([first_id, *tokens])
    check_ids(folder, ids, model)  # refuses ids for which the model has no embedding
    return ids
