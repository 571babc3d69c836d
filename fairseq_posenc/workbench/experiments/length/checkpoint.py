"""Reads a causal language model from a file, if asked with other options of its positions."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, Optional

from fairseq import checkpoint_utils
from fairseq.data import Dictionary
from fairseq.dataclass.utils import overwrite_args_by_name
from fairseq.models import FairseqLanguageModel

from fairseq_posenc.checkpoints.identity import override_positions
from fairseq_posenc.errors import UserError
from fairseq_posenc.models.causal_lm import PositionalLM
from fairseq_posenc.registry import Spec
from fairseq_posenc.transformer.options import resolve
from fairseq_posenc.workbench.experiments.length.variants import Variant
from fairseq_posenc.workbench.loading.checkpoints import load_state, updates_of
from fairseq_posenc.workbench.running.devices import PLAIN, Computing

TASK = "language_modeling"
_OTHER_TARGETS = ("add_bos_token", "self_target", "past_target")  # fairseq's options for them


class LoadedModel(NamedTuple):
    """A model that is ready to score.

    Attributes:
        model: in evaluation mode, on its device.
        encoding: its position encodings, as it was read; None for a model of fairseq's own.
        trained_length: tokens in a training sample.
        updates: training updates; None if the file does not tell.
        limit: the longest input; None if the position encodings themselves refuse what they cannot.
    """

    model: FairseqLanguageModel
    encoding: Optional[Spec]
    trained_length: int
    updates: Optional[int]
    limit: Optional[int]


def load(
    variant: Variant,
    data: Path,
    dictionary: Dictionary,
    how: Computing = PLAIN,
) -> LoadedModel:
    """Read a model from its checkpoint.

    Args:
        variant: which one, and with which positions.
        data: folder of the text, whose dictionary must be the model's.
        dictionary: of that folder.
        how: on what, and in what, to compute.

    Raises:
        UserError: no checkpoint of a causal language model, a dictionary that is not the model's,
            or positions that it was not trained with.
    """
    state = load_state(variant.path, f"{variant.name}:")
    settings = state["cfg"]
    _refuse_other_tasks(variant, settings.task)
    _refuse_other_symbols(variant, settings.task, data, dictionary)
    # A checkpoint may have been trained with --init-positions; here it would hide a mistake.
    changes: dict[str, Any] = {"data": str(data), "init_positions": False}
    if variant.override is not None:
        _refuse_other_encodings(variant, variant.override, settings.model)
        changes["position_encoding"] = str(variant.override)
        changes["position_encoding_decoder"] = None
        override_positions(state["model"], variant.override)
    overwrite_args_by_name(settings, changes)
    model = _build(variant, {**state, "args": None, "cfg": settings}, data, dictionary)
    ours = isinstance(model, PositionalLM)
    return LoadedModel(
        model=how.place(model),
        encoding=model.decoder.assembly.spec if ours else None,
        trained_length=int(settings.task.tokens_per_sample),
        updates=updates_of(state) or None,
        limit=None if ours else int(model.max_positions()),
    )


def _build(
    variant: Variant, state: dict[str, Any], data: Path, dictionary: Dictionary
) -> FairseqLanguageModel:
    path = str(variant.path)
    try:
        (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([path], state=state)
    except UserError as error:
        how = f" cannot be read with {variant.override}" if variant.override else ""
        raise UserError(f"{variant.name}: {path}{how}: {error}") from error
    except RuntimeError as error:  # torch's, about sizes: all of them but one are the checkpoint's
        raise UserError(
            f"{variant.name}: {path} does not go with the {len(dictionary):,} symbols of "
            f"{data / 'dict.txt'}: --data must have the dictionary that the model was trained with"
        ) from error
    return model


def _refuse_other_tasks(variant: Variant, task: Any) -> None:
    name = task._name
    if name != TASK:
        raise UserError(
            f"{variant.name}: {variant.path} was trained for the task {name}; causal language "
            f"models, of the task {TASK}, are needed"
        )
    for option in _OTHER_TARGETS:
        if task.get(option):
            raise UserError(
                f"{variant.name}: {variant.path} was trained with --{option.replace('_', '-')}"
                ": only models that predict the next token, and nothing else, are supported"
            )


def _refuse_other_symbols(variant: Variant, task: Any, data: Path, dictionary: Dictionary) -> None:
    """Refuse a dictionary of the same size with other symbols, if the trained one is still there.

    The figures would be nonsense, and nothing else would tell.
    """
    trained = Path(task.data.split(":")[0], "dict.txt")
    if not trained.is_file():
        return
    symbols = Dictionary.load(str(trained)).symbols
    if len(symbols) == len(dictionary) and symbols != dictionary.symbols:
        raise UserError(
            f"{variant.name}: {data / 'dict.txt'} and {trained}, which {variant.path} was "
            "trained with, differ: --data must have the dictionary that the model was trained with"
        )


def _refuse_other_encodings(variant: Variant, override: Spec, model: Any) -> None:
    """Allow changed options only: other encodings would give figures without a meaning."""
    if "position_encoding" not in model:
        raise UserError(f"{variant.name}: {variant.path} is a model of fairseq's own: no @SPEC")
    trained = resolve(model).decoder
    if [item.name for item in override.items] != [item.name for item in trained.items]:
        raise UserError(
            f"{variant.name}: {variant.path} was trained with {trained}; {override} is another "
            "encoding, and @SPEC can change the options of the trained one only"
        )
