"""Defines ``fairseq-posenc export``, ``import`` and ``swap``."""

import argparse
from pathlib import Path
from shlex import quote

from fairseq_posenc.errors import UserError
from fairseq_posenc.files import refuse_bad_place
from fairseq_posenc.workbench.running.options import add_count, add_data


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``fairseq-posenc export``."""
    add = parser.add_argument
    add("--checkpoint", type=Path, required=True, metavar="FILE", help="a trained model")
    add("--out", type=Path, required=True, metavar="FOLDER", help="new or empty")
    text = "transformers (default), or ctranslate2 to serve a translation model or causal LM"
    add("--to", choices=["transformers", "ctranslate2"], default="transformers", help=text)
    add_data(parser, "folder with the dictionaries (default: the one it was trained on)")
    text = (
        "tokenizer: a sentencepiece model, a folder with encoder.json and vocab.bpe, words, "
        "characters, or none for no tokenizer (default: the one in the data folder)"
    )
    add("--tokens", metavar="WHAT", help=text)
    text = "type of the weights, with --to ctranslate2 (default: float32)"
    add("--quantization", choices=["float32", "float16", "int8"], help=text)


def run_export(options: argparse.Namespace) -> None:
    """Export a model to a folder, and print how much its scores differ from the model's."""
    if options.quantization and options.to != "ctranslate2":
        raise UserError("--quantization is for --to ctranslate2")
    # Imports are here and below because fairseq, transformers and CTranslate2 slow down --help.
    from fairseq_posenc.workbench.loading.open_model import open_model

    trained = open_model(options.checkpoint, options.data)
    if None in trained.positions.values():  # spec of each stack; None in fairseq's own models
        what = f"a {type(trained.model).__name__}, not a model of fairseq_posenc"
        advice = "start one from it with --finetune-from-model"
        raise UserError(f"--checkpoint {trained.path}: {what}: {advice}")
    if options.to == "ctranslate2":
        from fairseq_posenc.workbench.convert.to_ctranslate2 import export_to_ctranslate2

        quantization = options.quantization or "float32"
        lines = export_to_ctranslate2(trained, quantization, options.tokens, options.out)
    else:
        from fairseq_posenc.workbench.convert.to_transformers import export_to_transformers

        lines = export_to_transformers(trained, options.tokens, options.out)
    print("\n".join(lines))


def add_import_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``fairseq-posenc import``."""
    add = parser.add_argument
    text = "transformers model folder: a RoBERTa, or one that fairseq-posenc export wrote"
    add("--from", dest="source", type=Path, required=True, metavar="FOLDER", help=text)
    add("--out", type=Path, required=True, metavar="FILE", help="fairseq checkpoint to start from")


def run_import(options: argparse.Namespace) -> None:
    """Import a model as a start checkpoint, and print the command that trains from it."""
    from fairseq_posenc.workbench.convert.to_fairseq import import_folder
    from fairseq_posenc.workbench.hf.folders import check_folder

    if options.out.exists():
        raise UserError(f"--out {options.out} exists: name another file, or delete it")
    refuse_bad_place(options.out, "--out")  # before any work: it must be in an existing folder
    check_folder(options.source, "--from ")
    print(f"wrote {options.out}: {'; '.join(import_folder(options.source, options.out))}")
    print(f"train from it: fairseq-train DATA ... --finetune-from-model {quote(str(options.out))}")


def add_swap_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``fairseq-posenc swap``."""
    add = parser.add_argument
    add("--checkpoint", type=Path, required=True, metavar="FOLDER", help="transformers model")
    text = "new positions; own means those that the model has (default: own)"
    add("--position-encoding", metavar="SPEC", help=text)
    add_count(parser, "--max-positions", "longest input of the new model (default: the old one's)")
    text = "how tables by position become longer (default: new rows are untrained)"
    add("--extend", choices=("copy", "interpolate"), help=text)
    add("--out", type=Path, required=True, metavar="FOLDER", help="new or empty")
    add("--seed", type=int, default=1, metavar="N", help="of new parameters (default: 1)")


def run_swap(options: argparse.Namespace) -> None:
    """Write a folder with other positions, and print the origin of each position parameter."""
    if options.position_encoding is None and options.max_positions is None:
        raise UserError("nothing to swap: give --position-encoding or --max-positions")
    from fairseq_posenc.workbench.convert.swap import swap_folder
    from fairseq_posenc.workbench.hf.folders import check_folder

    advice = " (`hf download` prints one), or use fairseq-train --finetune-from-model FILE"
    check_folder(options.checkpoint, "--checkpoint ", f"{advice} --init-positions")
    lines = swap_folder(
        options.checkpoint,
        options.out,
        spec="own" if options.position_encoding is None else options.position_encoding,
        max_positions=options.max_positions,
        extend=options.extend,
        seed=options.seed,
    )
    print("\n".join(lines))
