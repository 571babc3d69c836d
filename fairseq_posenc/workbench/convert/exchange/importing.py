"""Builds a fairseq model with the weights of a Hugging Face folder, for ``import``."""

from __future__ import annotations

import re
from argparse import Namespace
from typing import Any, NamedTuple

import torch

from fairseq_posenc.checkpoints.safe_loading import readable_errors
from fairseq_posenc.checkpoints.trusted_settings import check_settings, refuse_files
from fairseq_posenc.errors import UserError, shortened
from fairseq_posenc.identity import WeightSettings
from fairseq_posenc.workbench.convert.exchange.config_json import list_layer_options
from fairseq_posenc.workbench.convert.exchange.from_hf_config import (
    options_from_config,
    update_options,
)
from fairseq_posenc.workbench.convert.exchange.hf_folder_reader import HFFolder
from fairseq_posenc.workbench.convert.exchange.hf_folder_writer import (
    CODE,
    CONFIG,
    FAIRSEQ,
    WEIGHTS,
    generate_code,
)
from fairseq_posenc.workbench.convert.exchange.hf_mapping import (
    from_hf_weights,
    split_query_key_value,
)
from fairseq_posenc.workbench.loading.checkpoints import refuse_unusable_settings
from fairseq_posenc.workbench.loading.families import (
    NO_WEIGHTS,
    build,
    defaults,
    find_family,
    list_stacks,
)

_FINE_TUNING = {"masked_lm": ("glue", "squad")}  # family -> tasks beside its pre-training
_VERSION = re.compile(r"^Written by fairseq-posenc [\w.+-]+ from", re.MULTILINE)
_PRETRAINING_HEAD = "encoder.lm_head."  # fine-tuned models do not use it, and exports leave it out


class Built(NamedTuple):
    """A model of fairseq whose weights are still to be loaded."""

    model: Any  # with initial parameters, all of which must be replaced
    family: str  # `Family.name`
    settings: dict[str, Any]  # fairseq's configuration, as dictionaries
    head: str  # `spans`, `classes`, or the name of the family
    changed: dict[str, Any]  # options that have changed since the export


def build_model(folder: HFFolder) -> Built:
    """Build the fairseq model for a folder's weights.

    Raises:
        UserError: the settings are wrong, or describe a model of another size.
    """
    _refuse_other_code(folder)
    settings = folder.settings or options_from_config(folder.config, folder.path)
    with readable_errors(str(folder.path / CONFIG)):
        check_settings({"cfg": settings})
        refuse_files({"cfg": settings})
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
    if folder.settings:
        settings = update_options(settings, folder)
        options, task = settings["model"], settings["task"]
    config = defaults(arch, task["_name"])
    plain = isinstance(config["model"], dict)
    values = {**(config["model"] if plain else vars(config["model"])), **options}
    _refuse_other_sizes({**values, "classes": settings.get("classes")}, folder)
    symbols = _read_vocabulary_sizes(folder)
    with refuse_unusable_settings(str(folder.path)):
        model = build({**values, "_name": arch}, symbols)
        if settings.get("head") == "spans":
            model.register_span_head()
        elif settings.get("head") == "classes":
            name, number = str(settings["head_name"]), int(settings["classes"])
            model.register_classification_head(name, num_classes=number)
    config["model"] = values if plain else Namespace(**values)
    config["task"] = {**config["task"], **task, "data": str(folder.path)}
    before = (folder.settings or settings)["model"]
    changed = {name: value for name, value in options.items() if before.get(name) != value}
    head = str(settings.get("head") or family.name)
    return Built(model.eval(), family.name, config, head, changed)


def _refuse_other_code(folder: HFFolder) -> None:
    """Refuse a folder whose code is not what this version writes, as it may compute otherwise.

    The code is compared as text, except for the version in its title, and not run.
    """
    path = folder.path / CODE
    if not path.is_file():
        return
    try:
        expected = _VERSION.sub("", generate_code(folder.config), count=1)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{folder.path / CONFIG}: is not of {CODE}: {error!r}") from None
    text = path.read_text(encoding="utf-8", errors="replace")
    if _VERSION.sub("", text, count=1) != expected:
        raise UserError(
            f"{path}: is not the code that this version of fairseq_posenc writes for {CONFIG}, so "
            "the weights may mean something else; import them with the version that exported "
            "them, or remove the file to read them as this version does"
        )


def _read_vocabulary_sizes(folder: HFFolder) -> list[int]:
    """Read the number of symbols of each stack in config.json."""
    stacks = [folder.config.get(key) for key in ("encoder_stack", "decoder_stack")]
    holders = [stack for stack in stacks if isinstance(stack, dict)] or [folder.config]
    sizes: list[Any] = [holder.get("vocab_size") for holder in holders]
    if not all(isinstance(size, int) and size > 4 for size in sizes):
        raise UserError(f"{folder.path / CONFIG}: has no vocab_size of more than 4")
    return sizes


def _refuse_other_sizes(values: dict[str, Any], folder: HFFolder) -> None:
    """Refuse settings of a model that is far larger than the weights, before it is built."""
    count = sum(weight.numel() for weight in folder.weights.values())
    numbers = _read_vocabulary_sizes(folder)
    for side in ("encoder", "decoder"):
        layers, width, inner = sizes = [
            values.get(f"{side}_{name}") or 0 for name in ("layers", "embed_dim", "ffn_embed_dim")
        ]
        if all(isinstance(size, int) for size in sizes):
            numbers.append(layers * width * (4 * width + 2 * inner))
    positions = ("max_positions", "max_source_positions", "max_target_positions", "classes")
    numbers += [values.get(name) or 0 for name in positions]
    if not all(isinstance(x, int) and 0 <= x <= max(2 * count, 10_000) for x in numbers):
        raise UserError(
            f"{folder.path}: its {count:,} weights do not fit the model of its settings"
        )


def load_weights(folder: HFFolder, built: Built) -> dict[str, Any]:
    """Load a folder's weights into its model; return the state dict.

    Raises:
        UserError: a tensor is missing, unexpected, or of another shape or type.
    """
    model_state: dict[str, Any] = built.model.state_dict()
    (_, stack), *_ = list_stacks(built.model)
    weights = split_query_key_value(folder.weights, stack.assembly.dims.num_heads)
    unused = _list_pretraining_head(built, model_state)
    wanted = [name for name in model_state if not name.endswith(NO_WEIGHTS) and name not in unused]
    converted, used = from_hf_weights(folder.config, weights, wanted, built.model)
    unused_tensors = sorted(weights.keys() - used)
    missing = [name for name in wanted if name not in converted]
    other = [name for name in converted if converted[name].shape != model_state[name].shape]
    for names, problem in (
        (missing, "tensors of the model are not there"),
        (unused_tensors, "tensors have no place in the model"),
        (other, "tensors have other shapes than the settings say"),
    ):
        if names:
            raise UserError(
                f"{folder.path / WEIGHTS}: {len(names):,} {problem}, such as {shortened(names[0])}"
            )
    converted |= {name: torch.zeros_like(model_state[name]) for name in unused}
    state = {**model_state, **converted}
    built.model.load_state_dict(dict(state))  # strict, with the checks of PositionCheckpoints
    _adopt_trained_settings(folder, built)
    loaded = built.model.state_dict()
    if torn := [name for name in converted if not torch.equal(loaded[name].cpu(), converted[name])]:
        raise UserError(
            f"{folder.path / WEIGHTS}: {shortened(torn[0])} is tied to another tensor in fairseq, "
            "but the two differ"
        )
    return {**loaded, **converted}


def _list_pretraining_head(built: Built, model_state: dict[str, Any]) -> list[str]:
    """List the parameters of a fine-tuned model's pre-training head, except tied embeddings.

    An export leaves them out. They become zeros, as random values might be taken for trained ones.
    """
    if built.head not in ("classes", "spans"):
        return []
    head = built.model.encoder.lm_head
    tied = head.weight is built.model.encoder.sentence_encoder.embed_tokens.weight
    kept = f"{_PRETRAINING_HEAD}weight" if tied else ""
    return [name for name in model_state if name.startswith(_PRETRAINING_HEAD) and name != kept]


def _adopt_trained_settings(folder: HFFolder, built: Built) -> None:
    """Take over the trained length, the dictionary's hash and the language from the folder."""
    config, kept = folder.config, folder.settings or {}
    for side, stack in list_stacks(built.model):
        stated = config.get(f"{side}_stack") or {}
        try:
            meaning = WeightSettings.parse((kept.get("meanings") or {}).get(side) or {})
            lengths = {side: stated.get("trained_on"), **(kept.get("trained_lengths") or {})}
            length = int(lengths[side] or 0)
        except (AttributeError, TypeError, ValueError) as error:
            raise UserError(f"{folder.path / CONFIG}: cannot be read: {error}") from None
        if others := meaning.differences(stack.weight_settings):
            raise UserError(f"{folder.path / CONFIG}: {side}: {'; '.join(others)}")
        stack.weight_settings = stack.weight_settings.fill_from(meaning)
        if stated:
            layers, by_options = stated["positions"], list_layer_options(stack.assembly.spec)
            if layers != by_options or stated["directions"] != list(stack.directions):
                written = ",".join("+".join(layer) or "none" for layer in layers)
                raise UserError(
                    f"{CONFIG}: the {side} has {written} there, and "
                    f"{stack.identity.positions} by the options under {FAIRSEQ!r}, or other "
                    "attention directions"
                )
        if length and "position_encoding" not in built.changed:
            stack.set_extra_state(stack.identity._replace(trained_length=length).to_tensor())
