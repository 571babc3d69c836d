"""Exports a trained model of fairseq as a folder of transformers.

The folder has a stock class of transformers with the positions of the checkpoint, a tokenizer, the
settings of ``generate`` and a card. It gets its name once its model was loaded and compared with
the trained one.
"""

from __future__ import annotations

import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from fairseq.data import Dictionary
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import CONFIG_MAPPING, GenerationConfig, PretrainedConfig, PreTrainedModel

from fairseq_posenc.checkpoints.dictionary import DICTIONARY, load_dictionary
from fairseq_posenc.errors import UserError
from fairseq_posenc.folders import whole_folder
from fairseq_posenc.hf import set_positions
from fairseq_posenc.hf.saving import load_model
from fairseq_posenc.workbench.convert.card import (
    LONGEST_TRANSLATION,
    Labels,
    format_usage,
    write_card,
)
from fairseq_posenc.workbench.convert.comparison import (
    compare_with_transformers,
    refuse_difference,
)
from fairseq_posenc.workbench.convert.stock_classes import (
    ACTIVATIONS,
    COPIES,
    EPSILON,
    STOCK_FAMILIES,
    TOKEN_TYPES,
    UNUSED_ROWS,
    StockFamily,
)
from fairseq_posenc.workbench.convert.tokenizer import write_tokenizers
from fairseq_posenc.workbench.loading.open_model import OpenModel

# Activations in the heads of RoBERTa: head -> option of fairseq and its value.
_HEAD_ACTIVATIONS = {
    "masked_lm": ("activation_fn", "gelu"),
    "classes": ("pooler_activation_fn", "tanh"),
}


def export_to_transformers(
    trained: OpenModel, tokens: str | None, out: Path, labels: Labels
) -> list[str]:
    """Write a folder of transformers, compare its model with the trained one, return a report.

    Args:
        trained: the model.
        tokens: value of ``--tokens``; None to find a tokenizer in the folder of the data.
        out: the folder.
        labels: labels of the model card.

    Raises:
        UserError: the models differ, or transformers has no such model.
    """
    stock = find_stock_family(trained)
    is_plain = has_own_positions(trained, stock)
    name = stock.classes[trained.head]
    with whole_folder(out) as folder:
        tokenizers = write_tokenizers(trained, tokens, folder)
        for dictionary in trained.dictionaries:
            (folder / dictionary).parent.mkdir(exist_ok=True)
            shutil.copyfile(trained.data / dictionary, folder / dictionary)
        build_stock_model(trained, stock, is_plain=is_plain).save_pretrained(folder)
        for path in folder.glob("*.safetensors"):  # which is written for its owner alone
            path.chmod((folder / "config.json").stat().st_mode)
        written = load_model(folder).eval()
        difference = compare_with_transformers(trained.model, trained.head, written)
        refuse_difference(f"{name} differs from the model", difference)
        notes = [] if tokenizers else ["no tokenizer"]
        notes.append(f"scores equal to {difference:.1e} of the largest one, on padded sentences")
        usage = format_usage(trained, is_plain, tokenizers)
        write_card(folder, trained, "transformers", usage, notes, labels)
    positions = "its own positions" if is_plain else "positions of fairseq-posenc"
    return [f"wrote {out}: {name} with {positions}", *notes]


def find_stock_family(trained: OpenModel) -> StockFamily:
    """Find the classes of transformers that compute a model.

    Raises:
        UserError: there are none.
    """
    _refuse_odd_parts(trained)
    candidates = [stock for stock in STOCK_FAMILIES if stock.family == trained.family.name]
    for stock in candidates:
        if all(_read_option(trained, option) == value for option, value in stock.computes.items()):
            _refuse_odd_options(trained, stock)
            return stock
    values = ", ".join(
        f"{option}={_read_option(trained, option)}" for option in candidates[0].computes
    )
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
    config = _build_config(trained, stock)
    model: PreTrainedModel = getattr(transformers, stock.classes[trained.head])(config)
    if not is_plain:
        _copy_positions(trained, model)
    if trained.family.name != "masked_lm":
        model.generation_config = _build_generation_config(trained)
    weights = _list_weights(trained)
    learned = "encoder.sentence_encoder.embed_positions.encodings.learned.table"
    if is_plain and f"{learned}.weight" in weights:
        hf_table = f"{model.base_model_prefix}.embeddings.position_embeddings"
        stock = replace(stock, parts={learned: hf_table, **stock.parts})
        weights[f"{learned}.weight"] = F.pad(weights[f"{learned}.weight"], (0, 0, UNUSED_ROWS, 0))
    for weight, parameter in stock.pair_weights(weights, model, trained.path):
        parameter.copy_(weight)
    for name, parameter in model.named_parameters():
        if name.endswith(TOKEN_TYPES):
            parameter.zero_()
        elif name in COPIES:
            parameter.copy_(model.get_parameter(COPIES[name]))
    return model.eval()


def _copy_positions(trained: OpenModel, model: PreTrainedModel) -> None:
    """Give a model of transformers the positions of a trained one, without their weights."""
    stacks = [*trained.stacks.values()]
    specs = [stack.assembly.spec for stack in stacks]
    names = {item.name for spec in specs for item in spec.items}
    reads_ends = not names.isdisjoint(("documents", "sentence_learned"))
    with warnings.catch_warnings():  # the positions taken away are a new model's, untrained
        warnings.simplefilter("ignore")
        set_positions(
            model,
            str(specs[0]),
            max_positions=max(stack.assembly.dims.max_positions for stack in stacks),
            decoder_spec=str(specs[1]) if specs[0] != specs[-1] else None,
            directions=stacks[0].identity.directions,
            boundary_id=stacks[0].eos_idx if reads_ends else None,
        )


def _list_weights(trained: OpenModel) -> dict[str, Tensor]:
    """List a model's weights by fairseq's names, without heads that the model does not use."""
    unused = [] if trained.head == "masked_lm" else ["encoder.lm_head."]
    if trained.head != "classes":
        unused.append("classification_heads.")
    weights = trained.weights
    return {name: weights[name] for name in weights if not name.startswith(tuple(unused))}


def _build_generation_config(trained: OpenModel) -> GenerationConfig:
    """Build the settings of ``generate``, for translations the defaults of fairseq-generate."""
    settings = GenerationConfig(**_list_special_tokens(trained))
    if trained.translates:
        decoder = trained.stacks["decoder"]
        settings.update(
            num_beams=5,
            early_stopping=True,
            length_penalty=1.0,
            min_new_tokens=1,  # before </s>, which is one more than a translation may have
            max_new_tokens=min(LONGEST_TRANSLATION, decoder.max_positions() - 1) + 1,
            suppress_tokens=[decoder.padding_idx],
        )
    return settings


def _refusal(trained: OpenModel, lacking: str) -> UserError:
    return UserError(f"{trained.path}: no class of transformers has {lacking}")


def _read_option(trained: OpenModel, option: str) -> Any:
    """Read an option from fairseq's ``TransformerConfig``, which all stacks of a model share."""
    cfg = next(iter(trained.stacks.values())).cfg
    side, _, name = option.partition("_")
    if side in ("encoder", "decoder"):  # `encoder_layers` is in its part `encoder`
        return getattr(getattr(cfg, side), name)
    return getattr(cfg, option)


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
    name = stock.classes[trained.head]
    sizes = [stack.embed_tokens.num_embeddings for stack in trained.stacks.values()]
    if sizes[0] != sizes[-1] and stock.model_type != "marian":
        raise UserError(
            f"{trained.path}: its dictionaries have {sizes[0]:,} and {sizes[1]:,} symbols, and "
            f"{name} has one dictionary: train with --joined-dictionary of fairseq-preprocess"
        )
    if trained.head in _HEAD_ACTIVATIONS:
        option, activation = _HEAD_ACTIVATIONS[trained.head]
        value = getattr(trained.model.args, option)
        if value != activation:
            raise UserError(
                f"{trained.path}: {option}={value}, and the head of {name} has {activation}"
            )


def _build_config(trained: OpenModel, stock: StockFamily) -> PretrainedConfig:
    """Build the configuration of the stock class."""
    stacks = [*trained.stacks.values()]
    fields: dict[str, Any] = {}
    for option, field in stock.options.items():
        value = _read_option(trained, option)
        if option == "activation_fn":
            value = ACTIVATIONS.get(value, value)
        elif "drop" in option:
            value = float(value)  # transformers refuses the 0 of fairseq
        if fields.setdefault(field, value) != value:
            raise _refusal(trained, f"{option}={value} beside {fields[field]} in the encoder")
    fields |= {
        **_list_special_tokens(trained),
        "vocab_size": stacks[0].embed_tokens.num_embeddings,
        "max_position_embeddings": max(x.assembly.dims.trained_length for x in stacks),
        "tie_word_embeddings": trained.ties_embeddings,
    }
    if trained.family.name == "masked_lm":
        fields["max_position_embeddings"] += UNUSED_ROWS
        fields |= {"layer_norm_eps": EPSILON, "type_vocab_size": 1}
    else:
        fields["scale_embedding"] = not _read_option(trained, "no_scale_embedding")
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


def _name_classes(trained: OpenModel, classes: int) -> dict[int, str]:
    """Name the classes, by the dictionary of the labels if there is one."""
    path = trained.data / "label" / DICTIONARY
    labels = load_dictionary(path, mask=False) if path.is_file() else Dictionary()
    # fairseq fills dictionaries up with `madeupword0000` and so on.
    names = [x for x in labels.symbols[labels.nspecial :] if not x.startswith("madeupword")]
    if len(names) != classes:
        names = [f"LABEL_{number}" for number in range(classes)]
    return dict(enumerate(names))
