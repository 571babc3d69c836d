"""Exports a trained model to a folder that transformers or onnxruntime reads.

If a class of transformers computes the same, the folder holds its configuration and weights. Else
it also holds code: a file with the package's own classes. The exported model is always read back
and compared with the trained one.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from omegaconf import OmegaConf
from torch import Tensor

from fairseq_posenc.errors import UserError
from fairseq_posenc.transformer.options import PositionConfig
from fairseq_posenc.workbench.convert.exchange import hf_folder_writer as writer
from fairseq_posenc.workbench.convert.exchange import hf_tokenizer
from fairseq_posenc.workbench.convert.exchange.config_json import (
    build_config,
    build_generation_config,
    collect_weights,
)
from fairseq_posenc.workbench.convert.exchange.hf_mapping import to_hf_class
from fairseq_posenc.workbench.convert.random_comparison import (
    TOLERANCE,
    compute_head_scores,
    is_rounding,
    largest_difference,
)
from fairseq_posenc.workbench.loading.families import model_options
from fairseq_posenc.workbench.loading.open_model import OpenModel


def export(
    trained: OpenModel, target: str, tokens: str | None, out: Path, labels: writer.Labels
) -> list[str]:
    """Write a folder that transformers or onnxruntime reads, and compare the two models.

    Args:
        trained: the model.
        target: ``hf``, ``hf4`` for transformers 4, or ``onnx``.
        tokens: value of ``--tokens``; None to find a tokenizer in the folder of the data.
        out: the folder.
        labels: labels of the model card.

    Returns:
        Lines for the user: the class, and notes.

    Raises:
        UserError: the models differ, or a part cannot be exported.
    """
    if target == "hf4" and int(transformers.__version__.split(".")[0]) > 4:
        raise UserError(
            f"--to hf4: transformers {transformers.__version__}, of this machine, has no such "
            "positions and cannot read the model back: pip install 'transformers<5', or --to hf"
        )
    with writer.create_folder(out) as folder:
        unknown_pieces, notes = _write_tokenizers(trained, tokens, folder)
        if target == "onnx":
            # Imported here, as its libraries are an extra.
            from fairseq_posenc.workbench.convert.exchange.onnx_graph import GRAPH, write_graph

            names, difference = write_graph(trained, folder)
            notes.append(f"equal to {difference:.1e} of the largest number, on padded sentences")
            usage = writer.format_graph_usage(names)
            is_part = trained.family.name == "translation"
            model = "the encoder of a translation model" if is_part else GRAPH
            contents = f"{model}, with {' and '.join(names)}"
        else:
            config = _write_model(trained, target, unknown_pieces, folder, notes)
            if trained.family.name != "masked_lm":
                generation_config = build_generation_config(trained)
                writer.write_json(folder / "generation_config.json", generation_config)
            for name in trained.dictionaries:
                (folder / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(trained.data / name, folder / name)
            usage = writer.format_model_usage(config)
            contents = str(config["architectures"][0])
        writer.write_card(folder, trained, target, usage, notes, labels)
    return [f"wrote {out}: {contents}", *notes]


def _write_model(
    trained: OpenModel, target: str, unknown_pieces: int, folder: Path, notes: list[str]
) -> dict[str, Any]:
    """Write config.json and weights, and code if no class of transformers fits; return config.json.

    ``unknown_pieces`` is the number of pieces of the tokenizer that the dictionary lacks. ``notes``
    are for the user, and extended.
    """
    config, weights = build_config(trained), collect_weights(trained)
    config[writer.FAIRSEQ] = _collect_fairseq_options(trained)
    version = 4 if target == "hf4" else None
    hf_export, why_not = to_hf_class(trained, config, weights, version)
    if unknown_pieces:
        hf_export, why_not = None, "no class of transformers has <unk> for such pieces"
    if hf_export is not None:
        writer.write_model(folder, hf_export.config, hf_export.weights)
        why_not = _compare(trained, folder, hf_export.config, notes)
        if not why_not:
            return hf_export.config
    notes.append(f"code of its own: {why_not}")
    writer.write_model(folder, config, weights)
    (folder / writer.CODE).write_text(writer.generate_code(config), encoding="utf-8")
    if problem := _compare(trained, folder, config, notes):
        raise UserError(f"{problem}: nothing was written")
    return config


def _compare(trained: OpenModel, folder: Path, config: dict[str, Any], notes: list[str]) -> str:
    """Compare a written model with the trained one.

    Returns:
        An empty text, and a further note in ``notes``; or why the models are not equal.
    """
    (name,) = config["architectures"]
    model = _read_back(folder, name)

    def compute_theirs(*tokens: Tensor) -> Tensor:
        inputs = dict(zip(("input_ids", "decoder_input_ids"), tokens))
        if trained.head != "translation":  # our code needs no mask, classes of transformers do
            inputs["attention_mask"] = tokens[0].ne(config["pad_token_id"]).long()
        output = model(**inputs)
        if trained.head == "spans":
            return torch.stack([output.start_logits, output.end_logits], -1)
        return output.logits

    compute_ours = partial(compute_head_scores, trained)
    of_classes = trained.head == "classes"
    difference = largest_difference(trained.model, compute_ours, compute_theirs, of_classes)
    if not is_rounding(difference):
        return (
            f"{name} differs from the model by {difference:.1e} of its largest score, and "
            f"{TOLERANCE:g} is rounding"
        )
    notes.append(f"scores equal to {difference:.1e} of the largest one, on padded sentences")
    return ""


def _read_back(folder: Path, architecture: str) -> Any:
    """Load the model of a written folder, with a class of transformers or of the folder's code.

    Raises:
        UserError: a tensor is missing, unexpected, or of another shape.
    """
    module: Any = transformers
    if (folder / writer.CODE).is_file():
        # A new module for each folder, registered because transformers looks it up.
        name = f"_{folder.resolve().name}_{writer.CODE.removesuffix('.py')}"
        spec = importlib.util.spec_from_file_location(name, folder / writer.CODE)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # its warnings are errors below
    try:
        model, info = getattr(module, architecture).from_pretrained(
            folder, output_loading_info=True, ignore_mismatched_sizes=True
        )
    finally:
        transformers.logging.set_verbosity(verbosity)
    for kind in ("missing", "unexpected", "mismatched"):
        if names := sorted(map(str, info[f"{kind}_keys"])):
            raise UserError(
                f"{len(names)} {kind} tensors, such as {names[0]}: the model is built with options "
                f"that {architecture} does not have"
            )
    return model.eval()


def _write_tokenizers(
    trained: OpenModel, tokens: str | None, folder: Path
) -> tuple[int, list[str]]:
    """Write a tokenizer for each dictionary; return the number of unknown pieces, and notes.

    Equal dictionaries share one tokenizer.
    """
    notes = []
    unknown_pieces = 0
    template = trained.family.name
    if template == "causal_lm" and trained.settings.task.get("add_bos_token"):
        template = "causal_lm with <s>"
    padding_side = "left" if trained.family.name == "causal_lm" else "right"
    longest = min(stack.max_positions() for stack in trained.stacks.values())
    source = next(iter(trained.dictionaries.values()))
    for name, dictionary in trained.dictionaries.items():
        if dictionary is not source and dictionary.symbols == source.symbols:
            continue
        language = name.split(".")[1] if trained.family.name == "translation" else ""
        tokenization = hf_tokenizer.find_tokenization(tokens, trained.data, language)
        if tokenization == "none":
            return 0, ["no tokenizer"]
        tokenizer, unknown = hf_tokenizer.build_tokenizer(tokenization, dictionary, template)
        tokenizer_folder = folder if dictionary is source else folder / writer.TARGET
        writer.write_tokenizer(tokenizer_folder, tokenizer, longest, padding_side)
        unknown_pieces += unknown
        if unknown:
            notes.append(
                f"{unknown:,} pieces are not in {name}: the tokenizer gives them numbers "
                "behind its symbols, and the model reads them as <unk>, as fairseq does"
            )
    return unknown_pieces, notes


def _collect_fairseq_options(trained: OpenModel) -> dict[str, Any]:
    """Collect fairseq's options, with which the model can be imported again.

    They are stored in config.json, because transformers keeps its entries when it saves a model.
    """
    kept: dict[str, Any] = {}
    specs = vars(PositionConfig())  # a spec may have slashes, in the lists of a scaling
    for section in ("model", "task"):
        options = trained.settings[section]
        if OmegaConf.is_config(options):
            options = OmegaConf.to_container(options, resolve=True, enum_to_str=True)
        options = options if isinstance(options, dict) else vars(options)
        kept[section] = {  # without paths, which are useless on another machine
            name: value
            for name, value in options.items()
            if not isinstance(value, str) or "/" not in value or name in specs
        }
    kept["task"]["data"] = "."
    if trained.family.name != "causal_lm":  # its configuration has only the model's options
        known = {"_name", *(option.dest for option in model_options(kept["model"]["_name"]))}
        kept["model"] = {name: x for name, x in kept["model"].items() if name in known}
    kept[writer.WEIGHT_SETTINGS], kept[writer.TRAINED_LENGTHS] = {}, {}
    for side, stack in trained.stacks.items():
        kept[writer.WEIGHT_SETTINGS][side] = stack.weight_settings._asdict()
        kept[writer.TRAINED_LENGTHS][side] = stack.identity.trained_length
    if trained.head == "classes":
        (kept["head_name"],) = trained.model.classification_heads
    return kept
