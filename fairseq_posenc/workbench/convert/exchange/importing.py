"""Builds a fairseq model with the weights of a Hugging Face folder, for ``import``.

A folder may come from a stranger, so code, settings and sizes are checked before a model is built,
then all tensors. An export of ours has fairseq's options in its config.json, and its model may have
been changed or trained further in transformers since. For other folders the options are found from
config.json.
"""

from __future__ import annotations

import json
from argparse import Namespace
from typing import Any, NamedTuple

import torch

from fairseq_posenc.checkpoints.safe_loading import readable_errors
from fairseq_posenc.checkpoints.trusted_settings import check_settings
from fairseq_posenc.errors import UserError, shortened
from fairseq_posenc.identity import WeightSettings
from fairseq_posenc.workbench.convert.exchange.config_json import list_layer_options
from fairseq_posenc.workbench.convert.exchange.from_hf_config import (
    options_from_config,
    plan_model,
)
from fairseq_posenc.workbench.convert.exchange.hf_folder_reader import HFFolder
from fairseq_posenc.workbench.convert.exchange.hf_folder_writer import (
    CODE,
    CONFIG,
    FAIRSEQ,
    TRAINED_LENGTHS,
    VERSION_LINE,
    WEIGHT_SETTINGS,
    WEIGHTS,
    generate_code,
)
from fairseq_posenc.workbench.convert.exchange.hf_mapping import from_hf_weights
from fairseq_posenc.workbench.convert.random_comparison import SPECIAL_SYMBOLS
from fairseq_posenc.workbench.loading.checkpoints import refuse_unusable_settings
from fairseq_posenc.workbench.loading.families import (
    NOT_WEIGHTS,
    build_default_settings,
    find_family,
    list_stacks,
)
from fairseq_posenc.workbench.loading.families import build_model as build_fairseq_model

_FINE_TUNING = {"masked_lm": ("glue", "squad")}  # family -> tasks beside its pre-training
_PRETRAINING_HEAD = "encoder.lm_head."  # fine-tuned models do not use it, and exports leave it out
# No size in config.json may exceed this many times the number of weights, except small sizes. Else
# a model could fill all memory before it is compared with the weights.
_MAX_SIZE_PER_WEIGHT = 2
_SMALL_SIZE = 10_000


class BuiltModel(NamedTuple):
    """A model of fairseq whose weights are still to be loaded."""

    model: Any  # with initial parameters, all of which must be replaced
    settings: dict[str, Any]  # fairseq's configuration, as dictionaries
    head: str  # `spans`, `classes`, or the name of the family
    changed: dict[str, Any]  # options that transformers' users changed since the export


def build_model(folder: HFFolder) -> BuiltModel:
    """Build the fairseq model for a folder's weights.

    Raises:
        UserError: the settings are wrong, or describe a model of another size.
    """
    _refuse_other_code(folder)
    exported = folder.settings or options_from_config(folder.config, folder.path)
    arch = _check_settings(exported, folder)
    plan = plan_model(exported, folder)
    config = dict(build_default_settings(arch, plan.task["_name"]))
    defaults = config["model"]  # a dictionary for causal LMs, else a Namespace
    options = {**(vars(defaults) if isinstance(defaults, Namespace) else defaults), **plan.model}
    symbols = _read_vocabulary_sizes(folder)
    _refuse_oversized(options, [*symbols, plan.classes], folder)
    with refuse_unusable_settings(str(folder.path)):
        model = build_fairseq_model({**options, "_name": arch}, symbols)
        if plan.head == "spans":
            model.register_span_head()
        elif plan.head == "classes":
            model.register_classification_head(plan.head_name, num_classes=plan.classes)
    config["model"] = type(defaults)(**options)
    config["task"] = {**config["task"], **plan.task, "data": str(folder.path)}
    old = exported["model"]
    changed = {name: value for name, value in plan.model.items() if old.get(name) != value}
    return BuiltModel(model.eval(), config, plan.head, changed)


def load_weights(folder: HFFolder, built: BuiltModel) -> dict[str, Any]:
    """Load a folder's weights into its model; return the state dict.

    Raises:
        UserError: a tensor is missing, unexpected, or of another shape or type.
    """
    model_state: dict[str, Any] = built.model.state_dict()
    absent_head = _list_pretraining_head(built, model_state)
    wanted = [
        name for name in model_state if not name.endswith(NOT_WEIGHTS) and name not in absent_head
    ]
    converted, surplus = from_hf_weights(folder.config, folder.weights, wanted, built.model)
    missing = [name for name in wanted if name not in converted]
    misshapen = [name for name in converted if converted[name].shape != model_state[name].shape]
    for names, problem in (
        (missing, "tensors of the model are not there"),
        (surplus, "tensors have no place in the model"),
        (misshapen, "tensors have other shapes than the settings say"),
    ):
        if names:
            raise UserError(
                f"{folder.path / WEIGHTS}: {len(names):,} {problem}, such as {shortened(names[0])}"
            )
    converted |= {name: torch.zeros_like(model_state[name]) for name in absent_head}
    # Strict, and with our models' checks of positions.
    built.model.load_state_dict({**model_state, **converted})
    _adopt_trained_settings(folder, built)
    loaded: dict[str, Any] = built.model.state_dict()
    # Of two tensors of the folder that are one parameter in fairseq, the last one is loaded.
    if replaced := [name for name in converted if not torch.equal(loaded[name], converted[name])]:
        raise UserError(
            f"{folder.path / WEIGHTS}: {shortened(replaced[0])} is tied to another tensor in "
            "fairseq, but the two differ"
        )
    return loaded


def _refuse_other_code(folder: HFFolder) -> None:
    """Refuse a folder whose code is not what this version writes, as it may compute otherwise.

    The code is compared as text, except for the version in its title, and not run.
    """
    path = folder.path / CODE
    if not path.is_file():
        return
    try:
        expected = VERSION_LINE.sub("", generate_code(folder.config), count=1)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{folder.path / CONFIG}: is not the configuration that {CODE} beside it reads "
            f"({error!r}); export the model again, or remove {CODE} to import without it"
        ) from None
    text = path.read_text(encoding="utf-8", errors="replace")
    if VERSION_LINE.sub("", text, count=1) != expected:
        raise UserError(
            f"{path}: is not the code that this version of fairseq_posenc writes for {CONFIG}, so "
            "the weights may mean something else; import them with the version that exported "
            "them, or remove the file to read them as this version does"
        )


def _check_settings(settings: dict[str, Any], folder: HFFolder) -> str:
    """Check that settings are safe and of a model of ours; return its architecture."""
    with readable_errors(str(folder.path / CONFIG)):
        check_settings({"cfg": settings})
    options, task = settings.get("model"), settings.get("task")
    if not isinstance(options, dict) or not isinstance(task, dict):
        raise UserError(f"{folder.path / CONFIG}: lacks the options of a model and its task")
    arch = str(options.get("_name") or options.get("arch"))
    family = find_family(arch)
    if family is None:
        raise UserError(
            f"{folder.path}: {shortened(arch)} is not an architecture of fairseq_posenc"
        )
    tasks = (family.task, *_FINE_TUNING.get(family.name, ()))
    if task.get("_name") not in tasks:
        raise UserError(f"{folder.path}: the task of its model is not one of {', '.join(tasks)}")
    return arch


def _read_vocabulary_sizes(folder: HFFolder) -> list[int]:
    """Read the number of symbols of each stack in config.json."""
    stacks = [folder.config.get(key) for key in ("encoder_stack", "decoder_stack")]
    # Only our exports with code have stacks.
    holders = [stack for stack in stacks if isinstance(stack, dict)] or [folder.config]
    sizes: list[Any] = [holder.get("vocab_size") for holder in holders]
    if not all(isinstance(size, int) and size > SPECIAL_SYMBOLS for size in sizes):
        raise UserError(f"{folder.path / CONFIG}: has no vocab_size of more than {SPECIAL_SYMBOLS}")
    return sizes


def _refuse_oversized(options: dict[str, Any], rows: list[int], folder: HFFolder) -> None:
    """Refuse settings of a model that is far larger than the weights, before it is built.

    ``rows`` are the numbers of symbols and of classes.
    """
    count = sum(weight.numel() for weight in folder.weights.values())
    lengths = ("max_positions", "max_source_positions", "max_target_positions")
    sizes = [*rows, *(options.get(name) or 0 for name in lengths)]
    for side in ("encoder", "decoder"):
        names = (f"{side}_layers", f"{side}_embed_dim", f"{side}_ffn_embed_dim")
        layers, width, inner = (options.get(name) or 0 for name in names)
        if all(isinstance(size, int) for size in (layers, width, inner)):  # else building fails
            # The weights of self-attention and of the feed-forward network.
            sizes.append(layers * width * (4 * width + 2 * inner))
    largest = max(_MAX_SIZE_PER_WEIGHT * count, _SMALL_SIZE)
    if not all(isinstance(size, int) and 0 <= size <= largest for size in sizes):
        raise UserError(
            f"{folder.path}: its {count:,} weights do not fit the model of its settings"
        )


def _list_pretraining_head(built: BuiltModel, model_state: dict[str, Any]) -> list[str]:
    """List the parameters of a fine-tuned model's pre-training head, except tied embeddings.

    An export leaves them out. They become zeros, as random values might be taken for trained ones.
    """
    if built.head not in ("classes", "spans"):
        return []
    head = built.model.encoder.lm_head
    is_tied = head.weight is built.model.encoder.sentence_encoder.embed_tokens.weight
    names = [name for name in model_state if name.startswith(_PRETRAINING_HEAD)]
    return [name for name in names if not (is_tied and name == f"{_PRETRAINING_HEAD}weight")]


def _adopt_trained_settings(folder: HFFolder, built: BuiltModel) -> None:
    """Take over the settings and the length that the folder's weights were trained with.

    Refuse them if they do not fit the model, and a config.json whose stacks have other positions or
    directions than fairseq's options in it.
    """
    fairseq_settings = folder.settings or {}
    for side, stack in list_stacks(built.model):
        stack_config = folder.config.get(f"{side}_stack") or {}
        try:
            weight_settings = fairseq_settings.get(WEIGHT_SETTINGS) or {}
            trained = WeightSettings.parse(weight_settings.get(side) or {})
            lengths = fairseq_settings.get(TRAINED_LENGTHS) or {}
            length = int(lengths.get(side, stack_config.get("trained_on")) or 0)
        except (AttributeError, TypeError, ValueError) as error:
            raise UserError(f"{folder.path / CONFIG}: cannot be read: {error}") from None
        if differences := trained.differences(stack.weight_settings):
            raise UserError(f"{folder.path / CONFIG}: {side}: {'; '.join(differences)}")
        stack.weight_settings = stack.weight_settings.fill_from(trained)
        if stack_config:
            _refuse_other_positions(stack, stack_config, side)
        if length and "position_encoding" not in built.changed:  # the new one is not trained
            stack.set_extra_state(stack.identity._replace(trained_length=length).to_tensor())


def _refuse_other_positions(stack: Any, config: dict[str, Any], side: str) -> None:
    """Refuse a stack of config.json with other positions or directions than fairseq's options."""
    pairs = (
        ("positions", config["positions"], list_layer_options(stack.assembly.spec)),
        ("directions", config["directions"], list(stack.directions)),
    )
    for name, in_config, in_model in pairs:
        if in_config != in_model:
            raise UserError(
                f"{CONFIG}: {side}_stack has the {name} {shortened(json.dumps(in_config))}, and by "
                f"the options under {FAIRSEQ!r} they are {shortened(json.dumps(in_model))}"
            )
