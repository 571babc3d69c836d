"""Builds the model of fairseq that computes what the model of a folder of transformers computes.

The folder's class must be one of :mod:`stock_classes`. Its configuration becomes fairseq's options,
and its weights get fairseq's names. Dictionaries are read if the folder has them.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fairseq import utils
from fairseq.data import Dictionary
from fairseq.models import ARCH_MODEL_REGISTRY
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from fairseq_posenc.checkpoints.dictionary import DICTIONARY, Placeholders, load_dictionary
from fairseq_posenc.errors import UserError, shortened
from fairseq_posenc.hf import set_positions
from fairseq_posenc.hf.saving import load_model
from fairseq_posenc.hf.settings import SPEC_FIELD, PositionSettings
from fairseq_posenc.specs import parse
from fairseq_posenc.tasks.glue.criterion import HEAD
from fairseq_posenc.workbench.convert.comparison import (
    compare_with_transformers,
    refuse_difference,
)
from fairseq_posenc.workbench.convert.stock_classes import (
    ACTIVATIONS,
    COPIES,
    EPSILON,
    STOCK_FAMILIES,
    UNUSED_ROWS,
    StockFamily,
)
from fairseq_posenc.workbench.loading.checkpoints import refuse_unusable_settings
from fairseq_posenc.workbench.loading.families import (
    FAMILIES,
    NOT_WEIGHTS,
    Family,
    build_default_settings,
    build_model,
    list_stacks,
)

_FINE_TUNING = {"classes": "glue", "spans": "squad"}  # head of a fine-tuned model -> fairseq's task
_PRETRAINING_HEAD = "encoder.lm_head."  # fine-tuned models of transformers do not have it


class Imported(NamedTuple):
    """A model of fairseq, in the parts of a checkpoint."""

    settings: dict[str, Any]  # fairseq's configuration, as dictionaries
    state: dict[str, Any]  # the state dict
    notes: list[str]  # for the user


def import_folder(path: Path) -> Imported:
    """Read a folder of transformers as a model of fairseq, and compare the two.

    Raises:
        UserError: the folder cannot be read, or fairseq has no such model.
    """
    if not path.is_dir():
        raise UserError(f"--from {path}: no such folder")
    source = load_model(path)
    stock, head = _find_stock_family(source, path)
    _refuse_other_fields(source.config, stock, path)
    if not hasattr(source.config, SPEC_FIELD):
        set_positions(source, "own")  # those of the class itself become ours, with our names
    config = source.config
    family = next(family for family in FAMILIES if family.name == stock.family)
    dictionaries = _load_dictionaries(path, config, family)
    options = _list_options(config, stock, family)
    weights = _read_weights(source, stock)
    options |= _list_ties(weights, stock)
    task: dict[str, Any] = {"_name": _FINE_TUNING.get(head, family.task), "data": str(path)}
    if family.name == "translation":
        task["source_lang"], task["target_lang"] = getattr(config, "langs", None) or (None, None)
    if family.name == "causal_lm":  # </s> begins texts, unless the model was trained with <s>
        task["add_bos_token"] = config.bos_token_id != config.eos_token_id
        options["add_bos_token"] = task["add_bos_token"]
    settings = dict(build_default_settings(options["_name"], task["_name"]))
    defaults = settings["model"]  # a dictionary for causal LMs, else a Namespace
    options = {**(vars(defaults) if isinstance(defaults, Namespace) else defaults), **options}
    with refuse_unusable_settings(str(path)):
        model = build_model(options, dictionaries, task)
        if head == "spans":
            model.register_span_head()
        elif head == "classes":
            model.register_classification_head(HEAD, num_classes=config.num_labels)
    notes = _copy_weights(model, source, weights, stock, head, path)
    unused_rows = UNUSED_ROWS if family.name == "masked_lm" else 0
    for _, stack in list_stacks(model):
        trained_length = config.max_position_embeddings - unused_rows
        identity = stack.identity._replace(trained_length=trained_length)
        stack.set_extra_state(identity.to_tensor())
    difference = compare_with_transformers(model.eval(), head, source.eval())
    refuse_difference(f"{path}: {stock.classes[head]} differs from fairseq's model", difference)
    settings["model"] = type(defaults)(**options)
    settings["task"] = {**settings["task"], **task}
    stacks = [f"{name} {stack.identity.describe()}" for name, stack in list_stacks(model)]
    return Imported(settings, model.state_dict(), [*stacks, *notes])


def _find_stock_family(model: PreTrainedModel, path: Path) -> tuple[StockFamily, str]:
    """Find the stock family of a model, and its head."""
    names = [cls.__name__ for cls in type(model).__mro__]
    for stock in STOCK_FAMILIES:
        for head, name in stock.classes.items():
            if name in names:
                return stock, head
    known = ", ".join(name for stock in STOCK_FAMILIES for name in stock.classes.values())
    raise UserError(
        f"{path}: a {names[0]} cannot be imported, but {known}. To change only the positions of a "
        "model of transformers, use fairseq-posenc swap"
    )


def _refuse_other_fields(config: PretrainedConfig, stock: StockFamily, path: Path) -> None:
    """Refuse settings of the class that fairseq's model does not have."""
    for name, expected in stock.fields.items():
        value = getattr(config, name, expected)
        # Some classes have `layer_norm_eps`, but do not read it.
        if name == "layer_norm_eps" and stock.family == "masked_lm" and value != expected:
            raise UserError(
                f"{path}: layer_norm_eps is {value}, and fairseq's layer norms have {EPSILON:g}: "
                "the model would compute something else"
            )
    if stock.family == "masked_lm" and config.hidden_act != "gelu":
        raise UserError(
            f"{path}: {shortened(str(config.hidden_act))} in its layers and gelu in its head; "
            "fairseq's RoBERTa has one activation for both"
        )


def _list_options(config: PretrainedConfig, stock: StockFamily, family: Family) -> dict[str, Any]:
    """List fairseq's options of the model, except those that tie embeddings."""
    positions = PositionSettings.read(config)
    items = parse(positions.spec).items
    arch = f"{family.stem}{items[0].name}" if items else ""
    options = {
        "_name": arch if arch in ARCH_MODEL_REGISTRY else f"{family.stem}none",
        "position_encoding": positions.spec,
        "position_encoding_decoder": positions.decoder_spec,
        "attention_directions": positions.directions,
        **stock.computes,
        **{option: getattr(config, field) for option, field in stock.options.items()},
        **dict.fromkeys(family.length_options.values(), positions.max_positions),
        "no_scale_embedding": not getattr(config, "scale_embedding", False),
    }
    fairseq_names = {ACTIVATIONS.get(x, x): x for x in utils.get_available_activation_fns()}
    activation = options["activation_fn"]
    options["activation_fn"] = fairseq_names.get(activation, activation)
    if "decoder_embed_dim" in options:
        options["decoder_input_dim"] = options["decoder_output_dim"] = options["decoder_embed_dim"]
    return options


def _list_ties(weights: dict[str, Tensor], stock: StockFamily) -> dict[str, bool]:
    """List the options that tie embeddings, by which tables of a model are equal."""

    def are_equal(*names: str) -> bool:
        first, *others = [weights[str(stock.find_name(name))] for name in names]
        return all(first.shape == x.shape and torch.equal(first, x) for x in others)

    if stock.family == "masked_lm":
        names = ("encoder.sentence_encoder.embed_tokens.weight", "encoder.lm_head.weight")
        has_head = stock.find_name(names[1]) in weights
        return {"untie_weights_roberta": has_head and not are_equal(*names)}
    ties = are_equal("decoder.embed_tokens.weight", "decoder.output_projection.weight")
    options = {"share_decoder_input_output_embed": ties}
    if stock.family == "translation":
        both = are_equal("decoder.embed_tokens.weight", "encoder.embed_tokens.weight")
        options["share_all_embeddings"] = ties and both
    return options


def _load_dictionaries(path: Path, config: PretrainedConfig, family: Family) -> list[Dictionary]:
    """Load the dictionaries of a folder, the source's first; use placeholders where it has none."""
    names = [DICTIONARY]
    sizes = [config.vocab_size]
    if family.name == "translation":
        languages = getattr(config, "langs", None) or ("source", "target")
        names = [f"dict.{language}.txt" for language in languages]
        sizes.append(getattr(config, "decoder_vocab_size", config.vocab_size))
    elif not (path / DICTIONARY).is_file():
        names = [f"input0/{DICTIONARY}"]  # of GLUE's data
    dictionaries: list[Dictionary] = []
    for name, size in zip(names, sizes):
        if not (path / name).is_file():
            dictionaries.append(Placeholders(size))
            continue
        dictionaries.append(load_dictionary(path / name, mask=family.name == "masked_lm"))
        if len(dictionaries[-1]) != size:
            raise UserError(
                f"{path / name}: has {len(dictionaries[-1]):,} symbols, and the model {size:,}"
            )
    return dictionaries


def _copy_weights(
    model: Any,
    source: PreTrainedModel,
    weights: dict[str, Tensor],
    stock: StockFamily,
    head: str,
    path: Path,
) -> list[str]:
    """Copy all weights of a model of transformers to one of fairseq; return notes for the user."""
    state: dict[str, Any] = model.state_dict()
    notes = []
    unread = {id(parameter) for parameter in source.parameters()}
    parameters = dict(source.named_parameters(remove_duplicate=False))
    for name in state:
        if name.endswith(NOT_WEIGHTS):
            continue
        hf_name = str(stock.find_name(name))
        if name.startswith(_PRETRAINING_HEAD) and head != "masked_lm":
            if name != f"{_PRETRAINING_HEAD}weight":  # the token embeddings
                state[name] = torch.zeros_like(state[name])  # random values could seem trained
            continue
        if hf_name not in weights or weights[hf_name].shape != state[name].shape:
            raise UserError(f"{path}: {hf_name} is missing, or of another shape than fairseq's")
        state[name] = weights[hf_name]
        unread.discard(id(parameters[hf_name]))
    model.load_state_dict(state)  # strict, and with our models' checks of positions
    others = [
        name
        for name, parameter in parameters.items()
        if id(parameter) in unread
        and name not in COPIES
        and not name.endswith("token_type_embeddings.weight")
    ]
    if others:
        raise UserError(f"{path}: fairseq has no place for {others[0]}")
    if head != "masked_lm" and stock.family == "masked_lm":
        notes.append("no head for masked tokens in the folder: zeros in the checkpoint")
    return notes


def _read_weights(source: PreTrainedModel, stock: StockFamily) -> dict[str, Tensor]:
    """Read the weights of a model, with the embedding of token type 0 in those of other tables.

    Every token has type 0: its embedding is added to the table of positions, or else of tokens.
    """
    weights = dict(source.state_dict())
    types = next((name for name in weights if name.endswith("token_type_embeddings.weight")), None)
    if types is not None and weights[types][0].any():
        stack = "encoder.sentence_encoder"
        names = [
            stock.find_name(f"{stack}.embed_positions.encodings.learned.table.weight"),
            stock.find_name(f"{stack}.embed_tokens.weight"),
        ]
        name = next(name for name in names if name in weights)
        weights[name] = weights[name] + weights[types][0]
    return weights
