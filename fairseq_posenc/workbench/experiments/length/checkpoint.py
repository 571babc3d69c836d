"""Causal language models as the user names them, ``NAME=CHECKPOINT[@SPEC]``, and their loading.

With ``@SPEC`` a model is read with other options of its positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

from fairseq.models import FairseqLanguageModel

from fairseq_posenc.encodings.temperatures import Temperature
from fairseq_posenc.errors import UserError
from fairseq_posenc.models.causal_lm import PositionalLM
from fairseq_posenc.registry import get
from fairseq_posenc.specs import Spec, parse
from fairseq_posenc.transformer.options import resolve
from fairseq_posenc.workbench.loading.checkpoints import load_state, read_updates
from fairseq_posenc.workbench.loading.open_model import open_model
from fairseq_posenc.workbench.running.devices import PLAIN, Computing
from fairseq_posenc.workbench.running.options import is_folder_name, parse_named

TASK = "language_modeling"
FORM = "NAME=CHECKPOINT or NAME=CHECKPOINT@SPEC"
_OTHER_TARGETS = ("add_bos_token", "self_target", "past_target")  # fairseq's options for them


class NamedCheckpoint(NamedTuple):
    """A checkpoint and what the user calls it."""

    name: str  # what the user calls it
    path: Path  # its checkpoint
    # position encodings to read it with, in place of those that it was trained with
    spec_override: Optional[Spec] = None


def parse_checkpoints(texts: Sequence[str]) -> list[NamedCheckpoint]:
    """Parse the models of the command line.

    Raises:
        UserError: malformed, two of the same name, a file that does not exist, or a bad spec.
    """
    return [_parse_checkpoint(*each) for each in parse_named(texts, FORM, "models").items()]


def _parse_checkpoint(name: str, value: str) -> NamedCheckpoint:
    if not is_folder_name(name):
        raise UserError(f"{name!r}: the name must be a valid folder name")
    path, at, spec = value.rpartition("@")
    if not at or Path(value).exists():
        path, spec = value, ""
    if not Path(path).is_file():
        raise UserError(f"{name}: the checkpoint {path} does not exist")
    return NamedCheckpoint(name, Path(path), parse(spec) if at and spec else None)


class LoadedModel(NamedTuple):
    """A model that is ready to score."""

    model: FairseqLanguageModel  # in eval mode, on its device
    encoding: str  # its position encodings, as it was read, or whose model it is
    trained_length: int  # tokens in a training sample
    updates: Optional[int]  # training updates; None if the file does not tell
    # the longest input; None if the position encodings themselves refuse what they cannot
    limit: Optional[int]


def load(named: NamedCheckpoint, data: Path, how: Computing = PLAIN) -> LoadedModel:
    """Read a model from its checkpoint, for a text whose dictionary must be the model's.

    Raises:
        UserError: no checkpoint of a causal language model, a dictionary that is not the model's,
            or positions that it was not trained with.
    """
    option = f"{named.name}:"
    state = load_state(named.path, option)
    task = state["cfg"].task
    _refuse_other_tasks(named, task)
    if named.spec_override is not None:
        _refuse_other_encodings(named, named.spec_override, state["cfg"].model)
    opened = open_model(named.path, data, option=option, state=state, spec=named.spec_override)
    model = opened.model
    ours = isinstance(model, PositionalLM)
    return LoadedModel(
        model=how.place(model),
        encoding=str(model.decoder.assembly.spec if ours else f"fairseq's {type(model).__name__}"),
        trained_length=int(task.tokens_per_sample),
        updates=read_updates(state) or None,
        limit=None if ours else int(model.max_positions()),
    )


def _refuse_other_tasks(named: NamedCheckpoint, task: Any) -> None:
    name = task._name
    if name != TASK:
        raise UserError(
            f"{named.name}: {named.path} was trained for the task {name}; give a causal language "
            f"model (task {TASK})"
        )
    for option in _OTHER_TARGETS:
        if task.get(option):
            raise UserError(
                f"{named.name}: {named.path} was trained with --{option.replace('_', '-')}: only "
                "models that predict the next token alone are supported"
            )


def _refuse_other_encodings(named: NamedCheckpoint, override: Spec, model: Any) -> None:
    """Allow changed options only: other encodings would give figures without a meaning."""
    if "position_encoding" not in model:
        raise UserError(f"{named.name}: {named.path} is fairseq's own model, which takes no @SPEC")
    trained = resolve(model).decoder
    if _list_encodings_with_weights(override) != _list_encodings_with_weights(trained):
        raise UserError(
            f"{named.name}: {named.path} was trained with {trained}; {override} is another "
            "encoding; @SPEC can change only options of the trained one, and temperatures"
        )


def _list_encodings_with_weights(spec: Spec) -> list[str]:
    """List the encodings of a spec, but for temperatures, which are read without training."""
    names = [item.name for item in spec.items]
    return [name for name in names if name != "none" and not issubclass(get(name), Temperature)]
