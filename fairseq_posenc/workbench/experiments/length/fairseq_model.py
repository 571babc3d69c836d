"""Opens causal language models of fairseq and the data that they read."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.data.data_utils import load_indexed_dataset
from fairseq.models import FairseqLanguageModel
from torch import Tensor

from fairseq_posenc import registry
from fairseq_posenc.checkpoints.dictionary import DICTIONARY
from fairseq_posenc.encodings.softmax import Temperature
from fairseq_posenc.errors import UserError
from fairseq_posenc.models.causal_lm import PositionalLM
from fairseq_posenc.specs import Spec, parse
from fairseq_posenc.transformer import options
from fairseq_posenc.workbench.experiments.length.model import LoadedModel, NamedModel
from fairseq_posenc.workbench.experiments.length.stream import Stream
from fairseq_posenc.workbench.loading.checkpoints import load_state, read_updates
from fairseq_posenc.workbench.loading.open_model import open_model
from fairseq_posenc.workbench.running.devices import ComputeOptions

_TASK = "language_modeling"
# Options with which a model does not predict just the next token of a stream of tokens.
_UNSUPPORTED_OPTIONS = ("add_bos_token", "self_target", "past_target")
_TOKENS_AT_A_TIME = 1024  # so many get their probabilities of the whole vocabulary together


def load(named: NamedModel, data: Path, computing: ComputeOptions) -> LoadedModel:
    """Open the model of a checkpoint, for a data-bin with the model's dictionary.

    Raises:
        UserError: the file is not a causal language model, the dictionary is another one, or the
            spec of ``named`` has other encodings than the model was trained with.
    """
    label = f"{named.name}:"  # begins the messages
    state = load_state(named.path, label)
    task = state["cfg"].task
    _refuse_other_tasks(named, task)
    override = None if named.spec_override is None else parse(named.spec_override)
    if override is not None:
        _refuse_other_encodings(named, override, state["cfg"].model)
    opened = open_model(named.path, data, option=label, state=state, spec=override)
    model = computing.place(opened.model)
    is_ours = isinstance(model, PositionalLM)
    encoding = model.decoder.assembly.spec if is_ours else f"fairseq's {type(model).__name__}"
    return LoadedModel(
        model=model,
        predict=partial(predict, model),
        encoding=str(encoding),
        trained_length=int(task.tokens_per_sample),
        updates=read_updates(state) or None,
        limit=None if is_ours else int(model.max_positions()),
    )


def _refuse_other_tasks(named: NamedModel, task: Any) -> None:
    """Refuse models that do not predict the next token of a stream."""
    name = task._name
    if name != _TASK:
        raise UserError(
            f"{named.name}: {named.path} was trained for the task {name}; give a causal language "
            f"model (task {_TASK})"
        )
    for option in _UNSUPPORTED_OPTIONS:
        if task.get(option):
            raise UserError(
                f"{named.name}: {named.path} was trained with --{option.replace('_', '-')}: only "
                "models that read a stream of tokens and predict the next one are supported"
            )


def _refuse_other_encodings(named: NamedModel, override: Spec, settings: Any) -> None:
    """Refuse other encodings than the trained ones, which are in the model's settings.

    Their options may change, so only names are compared. A temperature may be added or left out, as
    it needs no training.
    """
    if "position_encoding" not in settings:
        raise UserError(f"{named.name}: {named.path} is fairseq's own model, which takes no @SPEC")
    trained = options.resolve_positions(settings).decoder
    if _name_encodings(override) != _name_encodings(trained):
        raise UserError(
            f"{named.name}: {named.path} was trained with {trained}; {override} is another "
            "encoding; @SPEC can change only options of the trained one, and temperatures"
        )


def _name_encodings(spec: Spec) -> list[str]:
    """List the names of a spec's encodings except temperatures and ``none``."""
    names = [item.name for item in spec.items if item.name != "none"]
    return [name for name in names if not issubclass(registry.get(name), Temperature)]


def predict(model: FairseqLanguageModel, tokens: Tensor, targets: Tensor) -> Tensor:
    """Compute the log probabilities of targets, ``(B, n)``, which follow the last n tokens."""
    # fairseq's own decoder has no default for encoder_out.
    features = model.extract_features(tokens, encoder_out=None)[0]  # [B, T, C]
    features = features[:, tokens.size(1) - targets.size(1) :].flatten(0, 1)  # [B * n, C]
    log_probs = []
    parts = zip(features.split(_TOKENS_AT_A_TIME), targets.flatten().split(_TOKENS_AT_A_TIME))
    for part, part_targets in parts:
        output = (model.output_layer(part[None]), None)  # fairseq expects a batch and extra outputs
        sample = {"target": part_targets[None]}  # an adaptive softmax reads the targets
        logs = model.get_normalized_probs(output, log_probs=True, sample=sample)
        log_probs.append(logs.gather(2, part_targets[None, :, None]).flatten())
    return torch.cat(log_probs).view_as(targets)


def read_stream(data: Path, split: str) -> Stream:
    """Read all tokens of a split of data that ``fairseq-preprocess --only-source`` made.

    Raises:
        UserError: the folder has no dictionary or no such split, or the split is empty, damaged, or
            of another dictionary.
    """
    path = data / DICTIONARY
    if not path.is_file():
        raise UserError(
            f"--data {data}: {path} does not exist; name a folder that fairseq-preprocess "
            "--only-source made"
        )
    dictionary = Dictionary.load(str(path))
    dataset = load_indexed_dataset(str(data / split), dictionary)
    if dataset is None or not sum(dataset.sizes):
        splits = ", ".join(sorted(path.stem for path in data.glob("*.idx"))) or "none"
        raise UserError(f"--split {split}: {data} has no such tokens; it has the splits {splits}")
    tokens = torch.cat([dataset[index] for index in range(len(dataset))]).long()
    for token in (int(tokens.min()), int(tokens.max())):
        if not 0 <= token < len(dictionary):
            raise UserError(
                f"{data / split}.bin: has a token {token:,}, and dict.txt has {len(dictionary):,} "
                "symbols; name the dictionary that the text was preprocessed with"
            )
    return Stream.from_tokens(tokens, dictionary.eos())
