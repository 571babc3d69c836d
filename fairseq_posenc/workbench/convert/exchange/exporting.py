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
    compute_head_scores,
    draw_batches,
    is_rounding,
    largest_difference,
    refuse_difference,
)
from fairseq_posenc.workbench.loading.families import list_model_options
from fairseq_posenc.workbench.loading.open_model import OpenModel
from fairseq_posenc.workbench.running.folders import create_folder


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
    with create_folder(out) as folder:
        unknown_pieces, notes = _write_tokenizers(trained, tokens, folder)
        if target == "onnx":
            # Imported here, as its libraries are an extra.
            from fairseq_posenc.workbench.convert.exchange.onnx_graph import GRAPH, write_graph

            names, difference = write_graph(trained, folder)
            notes.append(f"equal to {difference:.1e} of the largest number, on padded sentences")
            usage = writer.format_graph_usage(names)
            model = "the encoder of a translation model" if trained.translates else GRAPH
            contents = f"{model}, with {' and '.join(names)}"
        else:
            config, difference, why_code = _write_model(trained, target, unknown_pieces, folder)
            if why_code:
                notes.append(f"code of its own: {why_code}")
            notes.append(
                f"scores equal to {difference:.1e} of the largest one, on padded sentences"
            )
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
    trained: OpenModel, target: str, unknown_pieces: int, folder: Path
) -> tuple[dict[str, Any], float, str]:
    """Write config.json and weights, and code if no class of transformers fits; compare the models.

    ``unknown_pieces`` is the number of pieces of the tokenizer that the dictionary lacks. Return
    config.json, the difference of the scores, and why there is code; empty without code.
    """
    config, weights = build_config(trained), collect_weights(trained)
    config[writer.FAIRSEQ] = _collect_fairseq_options(trained)
    if unknown_pieces:
        hf_export, why_code = None, "no class of transformers has <unk> for such pieces"
    else:
        hf_export, why_code = to_hf_class(trained, config, weights, for_version_4=target == "hf4")
    if hf_export is not None:
        writer.write_model(folder, hf_export.config, hf_export.weights)
        difference = _compare(trained, folder, hf_export.config)
        if is_rounding(difference):
            return hf_export.config, difference, ""
        (name,) = hf_export.config["architectures"]
        why_code = f"{name} differs from the model by {difference:.1e} of its largest score"
    writer.write_model(folder, config, weights)
    (folder / writer.CODE).write_text(writer.generate_code(config), encoding="utf-8")
    difference = _compare(trained, folder, config)
    refuse_difference(f"{config['architectures'][0]} differs from the model", difference)
    return config, difference, why_code


def _compare(trained: OpenModel, folder: Path, config: dict[str, Any]) -> float:
    """Compute the difference of the scores of a written model and the trained one."""
    (name,) = config["architectures"]
    model = _read_back(folder, name)

    def compute_theirs(*tokens: Tensor) -> Tensor:
        inputs = dict(zip(("input_ids", "decoder_input_ids"), tokens))
        if trained.head != "translation":  # its export is always our code, which needs no mask
            inputs["attention_mask"] = tokens[0].ne(config["pad_token_id"]).long()
        output = model(**inputs)
        if trained.head == "spans":
            return torch.stack([output.start_logits, output.end_logits], -1)
        return output.logits

    compute_ours = partial(compute_head_scores, trained)
    batches = draw_batches(trained.model)
    if trained.head == "classes":  # their scores come from the first token: no padding before it
        return largest_difference(batches[:1], compute_ours, compute_theirs, by_token=False)
    return largest_difference(batches, compute_ours, compute_theirs)


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

    Source and target share one if both their dictionaries and the pieces of their text are equal.
    """
    if tokens == "none":
        return 0, ["no tokenizer"]
    notes = []
    unknown_pieces = 0
    template = hf_tokenizer.find_template(trained)
    padding_side = "left" if trained.family.name == "causal_lm" else "right"
    longest = min(stack.max_positions() for stack in trained.stacks.values())
    source: tuple[Any, list[str]] | None = None
    for name, dictionary in trained.dictionaries.items():
        language = name.split(".")[1] if trained.translates else ""
        tokenization = hf_tokenizer.find_tokenization(tokens, trained.data, language)
        if source is None:  # the first dictionary, of a language model the only one
            source, tokenizer_folder = (tokenization, dictionary.symbols), folder
        elif source != (tokenization, dictionary.symbols):
            tokenizer_folder = folder / writer.TARGET
        else:
            continue
        tokenizer, unknown = hf_tokenizer.build_tokenizer(tokenization, dictionary, template)
        hf_tokenizer.write_tokenizer(tokenizer_folder, tokenizer, longest, padding_side)
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
    position_options = vars(PositionConfig())
    for section in ("model", "task"):
        options = trained.settings[section]
        if OmegaConf.is_config(options):
            options = OmegaConf.to_container(options, resolve=True, enum_to_str=True)
        options = options if isinstance(options, dict) else vars(options)
        # Without paths, which are useless on another machine; but the lists of a scaling have
        # slashes, too.
        kept[section] = {
            name: value
            for name, value in options.items()
            if name in position_options or not (isinstance(value, str) and "/" in value)
        }
    kept["task"]["data"] = "."
    if trained.family.name != "causal_lm":  # its configuration has only the model's options
        known = {"_name", *(option.dest for option in list_model_options(kept["model"]["_name"]))}
        kept["model"] = {name: x for name, x in kept["model"].items() if name in known}
    kept[writer.WEIGHT_SETTINGS], kept[writer.TRAINED_LENGTHS] = {}, {}
    for side, stack in trained.stacks.items():
        kept[writer.WEIGHT_SETTINGS][side] = stack.weight_settings._asdict()
        kept[writer.TRAINED_LENGTHS][side] = stack.identity.trained_length
    if trained.head == "classes":
        (kept["head_name"],) = trained.model.classification_heads
    return kept
