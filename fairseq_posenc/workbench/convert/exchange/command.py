"""Defines ``fairseq-posenc export`` and ``fairseq-posenc import``."""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path

from fairseq_posenc.errors import UserError, how_to_install, printable
from fairseq_posenc.workbench.running.options import add_data


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``fairseq-posenc export``."""
    add = parser.add_argument
    add("--checkpoint", type=Path, required=True, metavar="FILE", help="a trained model")
    add(
        "--to",
        choices=["hf", "hf4", "onnx", "ctranslate2"],
        required=True,
        help="hf: Hugging Face's transformers; hf4: transformers 4, whose RoBERTa has positions as "
        "in shaw and m4; onnx: an encoder as a graph; ctranslate2: a translation model or causal "
        "LM to serve",
    )
    add("--out", type=Path, required=True, metavar="FOLDER", help="new or empty")
    add_data(parser, "directory with the dictionaries (default: that of the training)")
    add(
        "--tokens",
        metavar="WHAT",
        help="tokenizer: a sentencepiece model, a folder with encoder.json and vocab.bpe, "
        "words, characters, or none for no tokenizer (default: the one in the data folder)",
    )
    quantization_help = "type of the weights, with --to ctranslate2 (default: float32)"
    add("--quantization", choices=["float32", "float16", "int8"], help=quantization_help)
    license_help = "licence of the weights for the model card, such as mit"
    add("--license", default="unknown", metavar="ID", help=license_help)
    language_help = "languages of the text for the model card, such as en or en,de"
    add("--language", default="", metavar="CODES", help=language_help)


def run_export(options: argparse.Namespace) -> int:
    """Export a model to a folder, and print how much its scores differ from the model's."""
    # transformers needs google.protobuf to read the sentencepiece model of a tokenizer.
    _require("export", "transformers", "tokenizers", "safetensors", "google.protobuf")
    if options.to == "onnx":
        _require("onnx", "onnx", "onnxruntime", "onnxscript")
    if options.to == "ctranslate2":
        _require("ctranslate2", "ctranslate2")
    elif options.quantization:
        raise UserError("--quantization is for --to ctranslate2")
    from fairseq_posenc.workbench.convert.exchange.exporting import export
    from fairseq_posenc.workbench.convert.exchange.hf_folder_writer import Labels
    from fairseq_posenc.workbench.loading.open_model import open_model

    trained = open_model(options.checkpoint, options.data)
    if not isinstance(trained.model, trained.family.model_class):
        raise UserError(
            f"--checkpoint {trained.path}: a {type(trained.model).__name__}, not a model of "
            "fairseq_posenc; fairseq-posenc swap converts it"
        )
    labels = Labels(options.license, tuple(filter(None, options.language.split(","))))
    if options.to == "ctranslate2":
        from fairseq_posenc.workbench.convert.exchange.ctranslate2.exporting import (
            export_to_ctranslate2,
        )

        quantization = options.quantization or "float32"
        lines = export_to_ctranslate2(trained, quantization, options.tokens, options.out, labels)
    else:
        lines = export(trained, options.to, options.tokens, options.out, labels)
    print("\n".join(lines))
    return 0


def add_import_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``fairseq-posenc import``."""
    add = parser.add_argument
    from_help = "folder of transformers: a RoBERTa, or one that fairseq-posenc export wrote"
    add("--from", dest="source", type=Path, required=True, metavar="FOLDER", help=from_help)
    add("--out", type=Path, required=True, metavar="FILE", help="start checkpoint of fairseq")
    add("--overwrite", action="store_true", help="replace --out if it exists")


def run_import(options: argparse.Namespace) -> int:
    """Import a model as a start checkpoint, and print the command that trains from it."""
    _require("export", "safetensors")
    from fairseq_posenc.workbench.convert.exchange.hf_folder_reader import (
        read_folder,
        refuse_odd_values,
    )
    from fairseq_posenc.workbench.convert.exchange.importing import build_model, load_weights
    from fairseq_posenc.workbench.loading.checkpoints import (
        refuse_existing_output,
        write_start_checkpoint,
    )
    from fairseq_posenc.workbench.loading.families import list_stacks

    refuse_existing_output("--out", options.out, options.overwrite)
    folder = read_folder(options.source)
    with refuse_odd_values(folder):
        built = build_model(folder)
        weights = load_weights(folder, built)
    write_start_checkpoint(built.settings, weights, options.out)
    stacks = [f"{name} {stack.identity.describe()}" for name, stack in list_stacks(built.model)]
    print(f"wrote {options.out}: {len(weights):,} tensors; {'; '.join(stacks)}")
    if built.head in ("classes", "spans"):
        print("the folder has no head for masked tokens: the checkpoint has zeros there")
    if built.changed:
        changed = printable(", ".join(f"{name} = {value}" for name, value in built.changed.items()))
        print(f"these settings were changed in transformers since the export: {changed}")
        spec = built.changed.get("position_encoding", "")
        if "scaling=dynamic" in spec or "scaling=longrope" in spec:
            print(
                "transformers scales these rotations by the longest row of a batch; here the "
                "model's number of positions decides, so that no row changes another"
            )
    print(f"train from it: fairseq-train DATA ... --finetune-from-model {options.out}")
    return 0


def _require(extra: str, *libraries: str) -> None:
    """Refuse to run without the libraries of an extra."""
    for name in libraries:
        try:
            import_module(name)
        except ModuleNotFoundError:
            raise UserError(f"needs {name}: {how_to_install(extra)}") from None
