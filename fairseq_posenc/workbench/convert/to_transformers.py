"""Exports a trained fairseq model as a folder that transformers loads.

The folder has a stock class of transformers with the positions of the checkpoint, a tokenizer, the
settings of ``generate`` and a card. It gets its name only if its model computes the same.
"""

import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional as F
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from fairseq_posenc.errors import UserError, counted
from fairseq_posenc.folders import whole_folder
from fairseq_posenc.hf import set_positions
from fairseq_posenc.workbench.convert import card, stock_classes
from fairseq_posenc.workbench.convert.comparison import compare_with_transformers, refuse_difference
from fairseq_posenc.workbench.convert.stock_classes import UNUSED_ROWS, StockFamily
from fairseq_posenc.workbench.convert.tokenizer import build_tokenizers, write_tokenizers
from fairseq_posenc.workbench.hf.folders import load_model
from fairseq_posenc.workbench.loading.open_model import OpenModel


def export_to_transformers(trained: OpenModel, tokens: str | None, out: Path) -> list[str]:
    """Write a transformers folder, compare its model with the trained one, return a report.

    Args:
        trained: the model.
        tokens: value of ``--tokens``; None to find a tokenizer in the folder of the data.
        out: the folder.

    Raises:
        UserError: the models differ, or transformers has no such model.
    """
    transformers.logging.disable_progress_bar()
    stock = find_stock_family(trained)
    specs = {stack.spec for stack in trained.stacks.values()}
    has_one_way_layers = any(x.identity.directions for x in trained.stacks.values())  # "": none
    is_plain = {*map(str, specs)} == {stock.own_positions} and not has_one_way_layers
    packages = {x.encoding.__module__.partition(".")[0] for spec in specs for x in spec.items}
    imports = [] if is_plain else ["fairseq_posenc.hf", *sorted(packages - {"fairseq_posenc"})]
    name = stock.classes[trained.head]  # such as RobertaForMaskedLM, for the head `masked_lm`
    tokenizers = build_tokenizers(trained, tokens)  # each has the dictionary's symbols, and others
    for (file, dictionary), tokenizer in zip(trained.dictionaries.items(), tokenizers):
        if surplus := tokenizer.get_vocab_size() - len(dictionary):
            fault = f"lacks {counted(surplus, 'pieces')} of the tokenizer"
            remedy = "only fairseq reads <unk> for them; --tokens none exports without a tokenizer"
            raise UserError(f"{trained.data / file}: {fault}: {remedy}")
    with whole_folder(out) as folder:  # renamed to `out` at the end
        tokenizer_folders = write_tokenizers(trained, tokenizers, folder)  # "" is `folder` itself
        for file in trained.dictionaries:
            (folder / file).parent.mkdir(exist_ok=True)
            shutil.copyfile(trained.data / file, folder / file)
        model = build_stock_model(trained, stock, is_plain=is_plain)
        # After `set_positions`, `save_pretrained` would look for another stock class that computes
        # the same; with `state_dict` it saves the model as it is.
        model.save_pretrained(folder, state_dict=model.state_dict())
        for path in folder.glob("*.safetensors"):  # transformers lets only their owner read them
            path.chmod((folder / "config.json").stat().st_mode)
        difference = compare_with_transformers(trained.model, trained.head, load_model(folder))
        refuse_difference(f"{name} differs from the model", difference)
        notes = [] if tokenizers else ["no tokenizer"]
        notes.append(f"scores differ by {difference:.1e} of the largest one, on padded sentences")
        notes += [f"load it after `import {', '.join(imports)}`"] if imports else []
        usage = card.format_usage(trained, imports, tokenizer_folders)
        card.write_card(folder, trained, "transformers", usage, notes)
    positions = "its own positions" if is_plain else "positions of fairseq-posenc"
    return [f"wrote {out}: {name} with {positions}", *notes]


def find_stock_family(trained: OpenModel) -> StockFamily:
    """Find the classes of transformers that compute a model; refuse a model that has none."""
    stock_classes.refuse_unsupported_parts(trained, "transformers")
    candidates = [stock for stock in stock_classes.STOCK_FAMILIES if stock.family == trained.family]
    for stock in candidates:
        if all(_read_option(trained, x) == value for x, value in stock.fixed_options.items()):
            return stock
    options = candidates[0].fixed_options  # all of a family fix the same options
    values = ", ".join(f"{x}={_read_option(trained, x)}" for x in options)
    raise UserError(f"{trained.path}: no class of transformers has a {trained.title} with {values}")


@torch.no_grad()
def build_stock_model(trained: OpenModel, stock: StockFamily, *, is_plain: bool) -> PreTrainedModel:
    """Build the transformers model that computes the same.

    Args:
        trained: the model.
        stock: its family in transformers.
        is_plain: whether to leave the positions to the class, which has them itself.

    Raises:
        UserError: the class lacks a part of the model.
    """
    model_class = getattr(transformers, stock.classes[trained.head])
    config = model_class.config_class(**_list_config_fields(trained, stock, is_plain))
    model: PreTrainedModel = model_class(config)
    if trained.head == "translation":
        model.generation_config = _build_generation_config(trained, config)
    if not is_plain:
        _set_positions(trained, model)
    weights = _select_weights(trained)
    learned = "encoder.sentence_encoder.embed_positions.encodings.learned.table"
    if is_plain and f"{learned}.weight" in weights:  # RoBERTa's table begins with unused rows
        own_table = f"{model.base_model_prefix}.embeddings.position_embeddings"
        stock = stock._replace(parts={learned: own_table, **stock.parts})  # the first fit is used
        weights[f"{learned}.weight"] = F.pad(weights[f"{learned}.weight"], (0, 0, UNUSED_ROWS, 0))
    for weight, parameter in stock.pair_weights(weights, model, trained.path):
        parameter.copy_(weight)
    for name, parameter in model.named_parameters():
        if name.endswith(stock_classes.TOKEN_TYPES):  # fairseq's tokens have no types
            parameter.zero_()
        elif copied := stock_classes.COPIES.get(name):  # fairseq has one tensor for both
            parameter.copy_(model.get_parameter(copied))
    return model.eval()


def _select_weights(trained: OpenModel) -> dict[str, Tensor]:
    """Select a model's weights without unused heads for tokens or classes, which fairseq keeps."""
    heads = {"masked_lm": "encoder.lm_head.", "classes": "classification_heads."}  # their prefixes
    unused = tuple(prefix for head, prefix in heads.items() if head != trained.head)
    # What our stacks store about their training, and fairseq's buffers without content.
    others = ("_extra_state", ".version", "._float_tensor")
    weights = trained.model.state_dict().items()  # tied ones under each of their names
    return {k: x for k, x in weights if not (k.startswith(unused) or k.endswith(others))}


def _set_positions(trained: OpenModel, model: PreTrainedModel) -> None:
    """Give a transformers model the positions of a trained one, whose weights are copied later."""
    stacks = [*trained.stacks.values()]  # one, or the encoder and the decoder
    specs = [stack.spec for stack in stacks]
    needs_ends = any(spec.names & {"documents", "sentence_learned"} for spec in specs)
    if needs_ends and model.can_generate():
        model.generation_config.use_cache = False  # ends are found in the ids, of which it has none
    with warnings.catch_warnings():  # about the class's own positions, untrained, which are lost
        warnings.simplefilter("ignore")
        set_positions(
            model,
            str(specs[0]),
            max_positions=max(stack.dims.max_positions for stack in stacks),
            decoder_spec=str(specs[-1]) if specs[-1] != specs[0] else None,
            directions=stacks[0].identity.directions,  # of the encoder; decoders have none
            boundary_id=stacks[0].eos_idx if needs_ends else None,
        )


def _build_generation_config(trained: OpenModel, config: PretrainedConfig) -> GenerationConfig:
    """Build the settings with which ``generate`` translates as fairseq-generate does by default."""
    return GenerationConfig(
        pad_token_id=config.pad_token_id,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        decoder_start_token_id=config.decoder_start_token_id,
        num_beams=5,
        early_stopping=True,
        length_penalty=1.0,
        min_new_tokens=1,  # </s> is not the first token; below, + 1 is for the </s> at the end
        max_new_tokens=min(card.LONGEST_TRANSLATION + 1, trained.stacks["decoder"].max_positions()),
        suppress_tokens=[config.pad_token_id],  # fairseq's search never writes padding
    )


def _read_option(trained: OpenModel, option: str) -> Any:
    """Read an option from fairseq's ``TransformerConfig``, which all stacks of a model share."""
    cfg = next(iter(trained.stacks.values())).cfg
    side, _, name = option.partition("_")
    if side in ("encoder", "decoder"):  # `encoder_layers` is in its part `encoder`
        return getattr(getattr(cfg, side), name)
    return getattr(cfg, option)


def _list_config_fields(trained: OpenModel, stock: StockFamily, is_plain: bool) -> dict[str, Any]:
    """List the fields of the stock class's configuration (config.json)."""
    stacks = [*trained.stacks.values()]  # one, or the encoder and the decoder
    fields: dict[str, Any] = {}
    for option, field in stock.config_fields.items():  # with the same value
        value = _read_option(trained, option)
        if option == "activation_fn":
            value = stock_classes.ACTIVATIONS.get(value, value)
        elif "drop" in option:
            value = float(value)  # transformers refuses the 0 of fairseq
        if fields.setdefault(field, value) != value:  # both stacks have one field, such as d_model
            both = f"{option}={value} beside {fields[field]} in the encoder"
            raise UserError(f"{trained.path}: no class of transformers has {both}")
    # A causal LM of fairseq begins texts with </s>, unless it was trained with --add-bos-token.
    begins_with_eos = trained.family == "causal_lm" and not trained.settings.task.add_bos_token
    # Rows of the class's own table, or the length of training, which `set_positions` reads there;
    # `_set_positions` passes the number of positions as an argument.
    lengths = [x.dims.max_positions if is_plain else x.dims.trained_length for x in stacks]
    fields |= {
        "pad_token_id": stacks[-1].padding_idx,
        "eos_token_id": stacks[-1].eos_idx,
        "bos_token_id": stacks[-1].eos_idx if begins_with_eos else stacks[-1].dictionary.bos(),
        "vocab_size": stacks[0].embed_tokens.num_embeddings,  # of the source
        "max_position_embeddings": max(lengths),
        "tie_word_embeddings": trained.ties_embeddings,  # of output and input; see below for BART
    }
    if trained.family == "masked_lm":
        fields["max_position_embeddings"] += UNUSED_ROWS  # RoBERTa's positions begin after them
        fields |= {"layer_norm_eps": stock_classes.EPSILON, "type_vocab_size": 1}
    else:
        fields["scale_embedding"] = not _read_option(trained, "no_scale_embedding")
    if trained.head == "translation":
        source, target = (stack.embed_tokens for stack in stacks)
        ties_all = source.weight is target.weight  # fairseq ties the output's to the target's then
        if stock.classes["translation"] == "MarianMTModel":
            fields["decoder_vocab_size"] = target.num_embeddings
            fields["share_encoder_decoder_embeddings"] = ties_all
        else:  # the field ties all three tables or none; two tied ones become copies
            fields["tie_word_embeddings"] = ties_all
        # fairseq's decoders begin with </s>. The field `langs` is ours, for `import`.
        fields["decoder_start_token_id"] = trained.stacks["decoder"].eos_idx
        fields["langs"] = [trained.settings.task.source_lang, trained.settings.task.target_lang]
    if trained.head == "classes":
        (classifier,) = trained.model.classification_heads.values()
        count = classifier.out_proj.out_features  # 1 for a score, which has no labels
        labels = trained.task.label_dictionary  # filled up with `madeupword0000` and so on
        names = labels.symbols[labels.nspecial :][:count] if count > 1 else ["LABEL_0"]
        fields["id2label"] = dict(enumerate(names))
        fields["label2id"] = {label: index for index, label in enumerate(names)}
    return fields
