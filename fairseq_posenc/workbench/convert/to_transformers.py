"""Builds the model of transformers that computes what a trained model of fairseq computes."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from fairseq.data import Dictionary
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, GenerationConfig, PretrainedConfig, PreTrainedModel

from fairseq_posenc.checkpoints.dictionary import DICTIONARY, load_dictionary
from fairseq_posenc.errors import UserError
from fairseq_posenc.hf import set_positions
from fairseq_posenc.workbench.convert.card import LONGEST_TRANSLATION
from fairseq_posenc.workbench.convert.stock_classes import (
    ACTIVATIONS,
    COPIES,
    STOCK_FAMILIES,
    UNUSED_ROWS,
    StockFamily,
)
from fairseq_posenc.workbench.loading.open_model import OpenModel


def find_stock_family(trained: OpenModel) -> StockFamily:
    """Find the classes of transformers that compute a model.

    Raises:
        UserError: there are none.
    """
    cfg = _read_cfg(trained)
    _refuse_odd_parts(trained)
    candidates = [stock for stock in STOCK_FAMILIES if stock.family == trained.family.name]
    for stock in candidates:
        if all(_read_option(cfg, option) == value for option, value in stock.computes.items()):
            _refuse_odd_options(trained, stock)
            return stock
    values = ", ".join(f"{option}={_read_option(cfg, option)}" for option in candidates[0].computes)
    raise _refusal(trained, f"a {trained.family.title} with {values}")


def has_own_positions(trained: OpenModel, stock: StockFamily) -> bool:
    """Check whether the stock class itself has the positions of a model."""
    stacks = trained.stacks.values()
    specs = {str(stack.assembly.spec) for stack in stacks}
    return specs == {stock.own_positions} and not any(x.identity.directions for x in stacks)


@torch.no_grad()
def build_stock_model(trained: OpenModel, stock: StockFamily, *, is_plain: bool) -> PreTrainedModel:
    """Build the model of transformers.

    Args:
        trained: the model.
        stock: its family in transformers.
        is_plain: whether to leave the positions to the class, which has them itself.

    Raises:
        UserError: the class lacks a part of the model.
    """
    model: PreTrainedModel = getattr(transformers, stock.classes[trained.head])(
        _build_config(trained, stock)
    )
    if not is_plain:
        encoder, *_, decoder = [*trained.stacks.values()] * 2
        first, last = (str(stack.assembly.spec) for stack in (encoder, decoder))
        items = [*encoder.assembly.spec.items, *decoder.assembly.spec.items]
        reads_ends = any(item.name in ("documents", "sentence_learned") for item in items)
        with warnings.catch_warnings():  # the positions taken away are a new model's, untrained
            warnings.simplefilter("ignore")
            set_positions(
                model,
                first,
                max_positions=max(x.assembly.dims.max_positions for x in (encoder, decoder)),
                decoder_spec=last if last != first else None,
                directions=encoder.identity.directions,
                boundary_id=encoder.eos_idx if reads_ends else None,
            )
    if trained.family.name != "masked_lm":
        model.generation_config = GenerationConfig(**build_generation_settings(trained))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    written: set[int] = set()
    for name, weight in list_weights(trained).items():
        place = _find_place(parameters, stock, name, is_plain)
        if place is None:
            raise _refusal(trained, name)
        parameter, rows = place
        if rows.shape != weight.shape:
            raise UserError(
                f"{trained.path}: {name} has the shape {tuple(weight.shape)}, and that of "
                f"{type(model).__name__} {tuple(rows.shape)}: it has one width and one number of "
                "positions for encoder and decoder"
            )
        if rows is not parameter:
            parameter.zero_()  # rows for no position
        rows.copy_(weight)
        written.add(id(parameter))
    _fill_others(model, written, trained.path)
    return model.eval()


def list_weights(trained: OpenModel) -> dict[str, Tensor]:
    """List a model's weights by fairseq's names, without heads that the model does not use."""
    unused = [] if trained.head == "masked_lm" else ["encoder.lm_head."]
    if trained.head != "classes":
        unused.append("classification_heads.")
    weights = trained.weights
    return {name: weights[name] for name in weights if not name.startswith(tuple(unused))}


def build_generation_settings(trained: OpenModel) -> dict[str, Any]:
    """Build the settings of ``generate``, for translations the defaults of fairseq-generate."""
    settings: dict[str, Any] = _list_special_tokens(trained)
    if trained.translates:
        decoder = trained.stacks["decoder"]
        # As in fairseq's search: at least one token before </s>, and padding is never generated.
        settings |= {
            "num_beams": 5,
            "early_stopping": True,
            "length_penalty": 1.0,
            "min_new_tokens": 1,
            "max_new_tokens": min(LONGEST_TRANSLATION, decoder.max_positions() - 1) + 1,  # </s>
            "suppress_tokens": [decoder.padding_idx],
        }
    return settings


def _refusal(trained: OpenModel, lacking: str) -> UserError:
    return UserError(f"{trained.path}: no class of transformers has {lacking}")


def _read_cfg(trained: OpenModel) -> Any:
    """Read fairseq's ``TransformerConfig``, which all stacks of a model share."""
    return next(iter(trained.stacks.values())).cfg


def _read_option(cfg: Any, option: str) -> Any:
    """Read an option; a ``TransformerConfig`` has ``encoder_layers`` in its part ``encoder``."""
    side, _, name = option.partition("_")
    return (
        getattr(getattr(cfg, side), name)
        if side in ("encoder", "decoder")
        else getattr(cfg, option)
    )


def _refuse_odd_parts(trained: OpenModel) -> None:
    """Refuse a model with parts or positions that no class has."""
    for stack in trained.stacks.values():
        if getattr(stack, "adaptive_softmax", None) is not None:
            raise _refusal(trained, "an adaptive softmax (--adaptive-softmax-cutoff)")
        if type(stack.embed_tokens) is not nn.Embedding:
            raise _refusal(trained, f"{type(stack.embed_tokens).__name__} as token embeddings")
        if getattr(stack, "rotates_source", False):
            raise _refusal(trained, "rope(cross_attention=true)")


def _refuse_odd_options(trained: OpenModel, stock: StockFamily) -> None:
    """Refuse options that the class does not have, and that no weight shows."""
    cfg = _read_cfg(trained)
    name = stock.classes[trained.head]
    sizes = [stack.embed_tokens.num_embeddings for stack in trained.stacks.values()]
    if len(set(sizes)) > 1 and stock.model_type != "marian":
        raise UserError(
            f"{trained.path}: its dictionaries have {sizes[0]:,} and {sizes[1]:,} symbols, and "
            f"{name} has one dictionary: train with --joined-dictionary of fairseq-preprocess"
        )
    if trained.family.name != "masked_lm":
        return
    if not cfg.no_scale_embedding:
        raise UserError(f"{trained.path}: {name} has no scaled embeddings")
    option, fixed = {"masked_lm": ("activation_fn", "gelu")}.get(trained.head, ("", ""))
    if trained.head == "classes":
        option, fixed = "pooler_activation_fn", "tanh"
    value = getattr(trained.model.args, option, fixed)
    if value != fixed:
        raise UserError(f"{trained.path}: {option}={value}, and the head of {name} has {fixed}")


def _build_config(trained: OpenModel, stock: StockFamily) -> PretrainedConfig:
    """Build the configuration of the stock class."""
    cfg = _read_cfg(trained)
    stacks = [*trained.stacks.values()]
    fields: dict[str, Any] = {}
    for option, field in stock.options.items():
        value = _read_option(cfg, option)
        if option == "activation_fn":
            value = ACTIVATIONS.get(value, value)
        elif "drop" in option:
            value = float(value)  # transformers refuses the 0 of fairseq
        if fields.setdefault(field, value) != value:
            raise _refusal(trained, f"{option}={value} beside {fields[field]} in the encoder")
    trained_length = max(stack.assembly.dims.trained_length for stack in stacks)
    rows = UNUSED_ROWS if trained.family.name == "masked_lm" else 0
    fields |= {
        **stock.fields,
        **_list_special_tokens(trained),
        "vocab_size": stacks[0].embed_tokens.num_embeddings,
        "max_position_embeddings": trained_length + rows,
        "tie_word_embeddings": trained.ties_embeddings,
    }
    if trained.family.name != "masked_lm":
        fields["scale_embedding"] = not cfg.no_scale_embedding
    if trained.translates:
        ties_all = trained.ties_embeddings and (
            stacks[0].embed_tokens.weight is stacks[1].embed_tokens.weight
        )
        if stock.model_type == "marian":
            fields["decoder_vocab_size"] = stacks[1].embed_tokens.num_embeddings
            fields["share_encoder_decoder_embeddings"] = ties_all
        else:
            fields["tie_word_embeddings"] = ties_all
        fields["langs"] = [trained.settings.task.source_lang, trained.settings.task.target_lang]
    if trained.head == "classes":
        (classifier,) = trained.model.classification_heads.values()
        fields["id2label"] = _name_classes(trained, classifier.out_proj.out_features)
        fields["label2id"] = {label: index for index, label in fields["id2label"].items()}
    return CONFIG_MAPPING[stock.model_type](**fields)


def _list_special_tokens(trained: OpenModel) -> dict[str, int]:
    """List special symbols by transformers' names, those of the decoder if there is one."""
    *_, stack = trained.stacks.values()
    # A causal LM of fairseq begins texts with </s>, unless it was trained with --add-bos-token.
    begins_with_eos = trained.family.name == "causal_lm" and not trained.settings.task.add_bos_token
    tokens = {
        "pad_token_id": stack.padding_idx,
        "eos_token_id": stack.eos_idx,
        "bos_token_id": stack.eos_idx if begins_with_eos else stack.dictionary.bos(),
    }
    if trained.translates:
        tokens["decoder_start_token_id"] = stack.eos_idx  # fairseq's decoders begin with </s>
    return tokens


def _find_place(
    parameters: dict[str, nn.Parameter], stock: StockFamily, name: str, is_plain: bool
) -> tuple[nn.Parameter, Tensor] | None:
    """Find the parameter for a weight of fairseq, and those of its rows that the weight fills."""
    if is_plain and name.endswith("embed_positions.encodings.learned.table.weight"):
        table = parameters[stock.own_table]
        return table, table[UNUSED_ROWS:]
    parameter = parameters.get(stock.find_name(name) or "")
    return None if parameter is None else (parameter, parameter)


def _fill_others(model: PreTrainedModel, written: set[int], path: Path) -> None:
    """Fill the parameters that fairseq's model lacks; refuse the class if it has other ones."""
    for name, parameter in model.named_parameters():
        if id(parameter) in written:
            continue
        if name.endswith("token_type_embeddings.weight"):
            parameter.zero_()
        elif name in COPIES:
            parameter.copy_(model.get_parameter(COPIES[name]))
        else:
            raise UserError(f"{path}: lacks {name}, which {type(model).__name__} has")


def _name_classes(trained: OpenModel, classes: int) -> dict[int, str]:
    """Name the classes, by the dictionary of the labels if there is one."""
    path = trained.data / "label" / DICTIONARY
    labels = load_dictionary(path, mask=False) if path.is_file() else Dictionary()
    # fairseq fills dictionaries up with `madeupword0000` and so on.
    names = [x for x in labels.symbols[labels.nspecial :] if not x.startswith("madeupword")]
    if len(names) != classes:
        names = [f"LABEL_{number}" for number in range(classes)]
    return dict(enumerate(names))
