"""Imports a transformers model folder: builds the fairseq model that computes the same.

The folder's class must be one of :mod:`stock_classes`. Its configuration becomes fairseq's options,
and its weights get fairseq's names. Dictionaries are read if the folder has them.
"""

from pathlib import Path
from typing import Any

import torch
from fairseq.data import Dictionary
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from fairseq_posenc.checkpoints.dictionary import DICTIONARY, Placeholders, load_dictionary
from fairseq_posenc.errors import UserError, counted
from fairseq_posenc.hf import set_positions
from fairseq_posenc.hf.own_positions import read_spec, read_trained_length
from fairseq_posenc.hf.settings import SPEC_FIELD, PositionSettings
from fairseq_posenc.tasks.glue.criterion import HEAD
from fairseq_posenc.workbench.convert import stock_classes
from fairseq_posenc.workbench.convert.comparison import compare_with_transformers, refuse_difference
from fairseq_posenc.workbench.convert.stock_classes import EPSILON, TOKEN_TYPES, StockFamily
from fairseq_posenc.workbench.hf.folders import load_model
from fairseq_posenc.workbench.loading import checkpoints, open_model

# Head of a model -> fairseq's task, where its name differs.
_TASKS = {"causal_lm": "language_modeling", "classes": "glue", "spans": "squad"}
# By family: the beginning of architectures' names, and the options for the number of positions.
_FAMILIES = {
    "masked_lm": ("roberta", ["max_positions"]),
    "causal_lm": ("transformer_lm", ["max_target_positions"]),
    "translation": ("transformer", ["max_source_positions", "max_target_positions"]),
}
_PRETRAINING_HEAD = "encoder.lm_head."  # fine-tuned transformers models do not have it
_STACK = "encoder.sentence_encoder"  # of masked LMs


@torch.no_grad()
def import_folder(path: Path, out: Path) -> list[str]:
    """Import a folder as a start checkpoint, if both models compute the same; return notes on it.

    Args:
        path: the folder.
        out: file of the checkpoint.

    Raises:
        UserError: the folder cannot be read, or fairseq has no such model.
    """
    source = load_model(path)  # in evaluation mode
    stock, head = _find_stock_family(source, path)
    # Other families' classes do not read this field: they have torch's default, as fairseq does.
    if stock.family == "masked_lm" and (epsilon := source.config.layer_norm_eps) != EPSILON:
        raise UserError(f"{path}: layer_norm_eps is {epsilon}, and fairseq's is {EPSILON:g}")
    if not hasattr(source.config, SPEC_FIELD):  # a stock folder
        set_positions(source, "own")  # its class's positions become ours, with our names
    config = source.config
    dictionaries = _load_dictionaries(path, config, stock.family)
    _fold_token_types(source, stock)  # may untie the embeddings, so ties are listed after it
    options = {**_list_options(config, stock), **_list_ties(source, stock)}
    task: dict[str, Any] = {"_name": _TASKS.get(head, head), "data": str(path)}
    if head == "masked_lm":  # without this option, `documents` cannot be trained
        task["include_target_tokens"] = "documents" in read_spec(source).names
    if stock.family == "translation":  # without our field `langs`, fairseq infers them from data
        task["source_lang"], task["target_lang"] = getattr(config, "langs", None) or (None, None)
    if stock.family == "causal_lm":  # </s> begins texts, unless the model was trained with <s>
        has_bos = config.bos_token_id != config.eos_token_id
        task["add_bos_token"] = options["add_bos_token"] = has_bos  # task and model both read it
    settings = open_model.build_settings(options, task)  # those that a training run would save
    with checkpoints.refuse_unusable_settings("", path):  # no option: errors name the folder
        model = open_model.build_model(settings, dictionaries)
        if head == "spans":
            model.register_span_head()
        elif head == "classes":
            model.register_classification_head(HEAD, num_classes=config.num_labels)
    weights = dict(model.named_parameters(remove_duplicate=False))  # tied ones by all names
    notes = []
    if head != stock.family:  # fine-tuned; random values of the missing head would look trained
        notes.append("no head for masked tokens in the folder: zeros in the checkpoint")
        for name in [name for name in weights if name.startswith(_PRETRAINING_HEAD)]:
            weights.pop(name).zero_()  # if tied, also the token embeddings, which are copied next
    for weight, parameter in stock.pair_weights(weights, source, path):
        weight.copy_(parameter)
    for name, stack in open_model.list_stacks(model).items():
        # The state dict has the identity: what the weights were trained with, such as this length.
        identity = stack.identity._replace(trained_length=read_trained_length(config))
        stack.set_extra_state(identity.to_tensor())
        notes.append(f"{name} {identity.describe()}")
    difference = compare_with_transformers(model.eval(), head, source)
    refuse_difference(f"{path}: {stock.classes[head]} differs from fairseq's model", difference)
    checkpoints.write_start_checkpoint(settings, model.state_dict(), out)
    return notes


def _find_stock_family(model: PreTrainedModel, path: Path) -> tuple[StockFamily, str]:
    """Find the stock family of a model, and its head."""
    names = [cls.__name__ for cls in type(model).__mro__]  # a stock class may be a base
    for stock in stock_classes.STOCK_FAMILIES:
        for head, name in stock.classes.items():
            if name in names:
                return stock, head
    others = "only RoBERTa and what export writes; fairseq-posenc swap changes positions"
    raise UserError(f"{path}: a {names[0]} cannot be imported, {others}")


def _list_options(config: PretrainedConfig, stock: StockFamily) -> dict[str, Any]:
    """List fairseq's options of the model, except those that tie embeddings."""
    positions = PositionSettings.read(config)
    stem, lengths = _FAMILIES[stock.family]
    options = {
        "_name": f"{stem}_none",  # an architecture: `roberta_none`, ...
        "position_encoding": positions.spec,  # it overrides the architecture's
        "position_encoding_decoder": positions.decoder_spec,
        "attention_directions": positions.directions,
        **stock.fixed_options,
        **{option: getattr(config, field) for option, field in stock.config_fields.items()},
        **dict.fromkeys(lengths, positions.max_positions),
        "no_scale_embedding": not getattr(config, "scale_embedding", False),
    }
    fairseq_names = {hf_name: name for name, hf_name in stock_classes.ACTIVATIONS.items()}
    activation = options["activation_fn"]
    options["activation_fn"] = fairseq_names.get(activation, activation)
    if width := options.get("decoder_embed_dim"):  # fairseq has two more options for it
        options |= {"decoder_input_dim": width, "decoder_output_dim": width}
    return options


def _list_ties(model: PreTrainedModel, stock: StockFamily) -> dict[str, bool]:
    """List the options that tie embeddings, by which tables of a model are equal."""
    parameters = dict(model.named_parameters(remove_duplicate=False))

    def are_equal(name: str, other: str) -> bool:
        return torch.equal(parameters[stock.find_name(name)], parameters[stock.find_name(other)])

    if stock.family == "masked_lm":
        tokens, output = f"{_STACK}.embed_tokens.weight", f"{_PRETRAINING_HEAD}weight"
        has_head = stock.find_name(output) in parameters
        return {"untie_weights_roberta": has_head and not are_equal(tokens, output)}
    ties = are_equal("decoder.embed_tokens.weight", "decoder.output_projection.weight")
    options = {"share_decoder_input_output_embed": ties}
    if stock.family == "translation":
        both = are_equal("decoder.embed_tokens.weight", "encoder.embed_tokens.weight")
        options["share_all_embeddings"] = ties and both
    return options


def _load_dictionaries(path: Path, config: PretrainedConfig, family: str) -> list[Dictionary]:
    """Load the dictionaries of a folder, the source's first; use placeholders where it has none."""
    sizes = {DICTIONARY: config.vocab_size}  # path in the folder -> number of symbols
    if family == "translation":
        source, target = getattr(config, "langs", None) or ("source", "target")
        decoder_size = getattr(config, "decoder_vocab_size", config.vocab_size)
        sizes = {f"dict.{source}.txt": config.vocab_size, f"dict.{target}.txt": decoder_size}
    elif not (path / DICTIONARY).is_file():
        sizes = {f"input0/{DICTIONARY}": config.vocab_size}  # its place in GLUE's data
    dictionaries: list[Dictionary] = []
    for name, size in sizes.items():
        file, mask = path / name, family == "masked_lm"
        dictionary = load_dictionary(file, mask=mask) if file.is_file() else Placeholders(size)
        if (count := len(dictionary)) != size:
            raise UserError(f"{file}: has {counted(count, 'symbols')}, the model has {size:,}")
        dictionaries.append(dictionary)
    return dictionaries


def _fold_token_types(model: PreTrainedModel, stock: StockFamily) -> None:
    """Add the embedding of token type 0 to the table of positions or else of tokens, in place.

    Every token has type 0, and fairseq has no types. The model computes the same as before.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))  # tied ones by all names
    types = next((x for name, x in parameters.items() if name.endswith(TOKEN_TYPES)), None)
    if types is not None and types[0].any():
        tables = ("embed_positions.encodings.learned.table", "embed_tokens")
        names = [stock.find_name(f"{_STACK}.{table}.weight") for table in tables]
        name = next(name for name in names if name in parameters)
        table = model.get_submodule(name.removesuffix(".weight"))
        # A new parameter: where the head's weight is tied to the old one, it must stay as it is.
        table.weight = nn.Parameter(table.weight + types[0])
        types.zero_()
