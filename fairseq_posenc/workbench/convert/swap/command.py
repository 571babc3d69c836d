"""Defines ``fairseq-posenc swap``, which gives a trained model other positions.

A model of transformers is a folder, which becomes a new folder; all else is a checkpoint.
"""

from __future__ import annotations

import argparse
import re
import shutil
from pathlib import Path

import torch

from fairseq_posenc.errors import UserError, how_to_install
from fairseq_posenc.workbench.running.files import find_model
from fairseq_posenc.workbench.running.folders import create_folder
from fairseq_posenc.workbench.running.options import add_count

# The options that change a model; at least one is needed.
_CHANGES = (
    "position_encoding",
    "position_encoding_decoder",
    "attention_directions",
    "max_positions",
    "arch",
)
_FAIRSEQ_ONLY = ("arch", "position_encoding_decoder", "attention_directions")
_CONFIG = "config.json"
# The files of a tokenizer, which are copied, and with them a licence: nothing else of a folder is.
_COPIED = re.compile(
    r"(tokenizer|vocab|merges|special_tokens|added_tokens|sentencepiece|spiece|source|target|"
    r"sentence_bert|bpe|processor|preprocessor)[\w.]*\.(json|txt|model|bpe|spm)|chat_template\.jinja|(LICENSE|NOTICE)[\w.]*"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = parser.add_argument
    text = "a trained RoBERTa, causal LM or translation model; or a folder of transformers"
    add("--checkpoint", type=Path, required=True, metavar="FILE", help=text)
    text = "architecture of the new model, for RoBERTa, as in roberta_m4m"
    add("--arch", metavar="NAME", help=text)
    defaults = "default: those of --arch, or the old"
    add("--position-encoding", metavar="SPEC", help=f"new positions ({defaults} ones)")
    text = "positions of a translation model's decoder (default: the same)"
    add("--position-encoding-decoder", metavar="SPEC", help=text)
    add("--attention-directions", metavar="LIST", help=f"as in lr,rl ({defaults} ones)")
    add_count(parser, "--max-positions", "longest input of the new model (default: the old one's)")
    add(
        "--extend",
        choices=("copy", "interpolate"),
        help="how tables by position become longer (default: refuse)",
    )
    add("--out", type=Path, metavar="FILE", help="start checkpoint (default with --arch: NAME.pt)")
    text = "random seed of new parameters (default: 1)"
    add("--seed", type=int, default=1, metavar="N", help=text)
    add("--overwrite", action="store_true", help="replace --out if it exists")


def run(options: argparse.Namespace) -> int:
    """Write the model with other positions, and print the origin of each position parameter."""
    if all(getattr(options, name) is None for name in _CHANGES):
        raise UserError("nothing to swap: give --position-encoding, --arch or --max-positions")
    options.checkpoint = find_model(options.checkpoint)
    if (options.checkpoint / _CONFIG).is_file():
        lines = _swap_folder(options)
    else:  # imported only here, as folders of transformers need no fairseq
        from fairseq_posenc.workbench.convert.swap.checkpoint import swap_checkpoint

        lines = swap_checkpoint(options)
    print("\n".join(lines))
    return 0


def _swap_folder(options: argparse.Namespace) -> list[str]:
    """Write a folder whose model has other positions; return lines that describe it.

    Raises:
        UserError: the folder cannot be read, or its model cannot have such positions.
    """
    try:
        from fairseq_posenc.hf import read_positions, set_positions
        from fairseq_posenc.hf.attention import POSITIONS
        from fairseq_posenc.hf.saving import load_model
    except ModuleNotFoundError as error:
        raise UserError(
            f"--checkpoint {options.checkpoint}: a folder of transformers needs {error.name}: "
            f"{how_to_install('hf')}"
        ) from None
    source, out = options.checkpoint, options.out
    for name in _FAIRSEQ_ONLY:
        if getattr(options, name):
            option = f"--{name.replace('_', '-')}"
            raise UserError(
                f"{option} is for models of fairseq, and {source} is one of transformers"
            )
    _refuse_output(out, options.overwrite)
    with create_folder(out, replaces=options.overwrite) as folder:
        torch.manual_seed(options.seed)
        model = load_model(source)
        old_positions = read_positions(model)
        old = dict(model.named_parameters())
        # `own` stands for the positions that the model has.
        spec = options.position_encoding or "own"
        set_positions(model, spec, options.max_positions, options.extend)
        new = dict(model.named_parameters())
        model.save_pretrained(folder)
        for file in source.iterdir():  # `load_model` has refused links to files elsewhere
            if file.is_file() and _COPIED.fullmatch(file.name):
                shutil.copy2(file, folder / file.name)
    both = [name for name in new if name in old]
    positions = [name for name in both if POSITIONS in name.split(".")]
    added = [name for name in new if name not in old]
    removed = [name for name in old if name not in new]
    return [
        f"source: {source}: {type(model).__name__}, positions: {old_positions}",
        f"kept bit for bit: the {len(both) - len(positions)} tensors that are not positions",
        *(_describe_origin(name, old[name], new[name]) for name in positions),
        *(f"in the new model alone: {name} {tuple(new[name].shape)}" for name in added),
        *(f"in the old model alone: {name} {tuple(old[name].shape)}" for name in removed),
        f"wrote {out}: positions: {read_positions(model)} "
        f"(max_positions {model.config.position_encoding_max_positions:,})",
        "load it: import fairseq_posenc.hf; transformers.AutoModel... .from_pretrained"
        f"({str(out)!r})",
    ]


def _describe_origin(name: str, old: torch.Tensor, new: torch.Tensor) -> str:
    """Describe what became of a position parameter that both models have."""
    if old.shape != new.shape:
        return f"resized: {name} {tuple(old.shape)} -> {tuple(new.shape)}"
    return f"{'kept' if torch.equal(old, new) else 'initialized'}: {name} {tuple(new.shape)}"


def _refuse_output(out: Path | None, overwrite: bool) -> None:
    """Refuse a folder with files, unless it contains a model and may be overwritten."""
    if out is None:
        raise UserError("--out: name the new folder")
    is_empty = out.is_dir() and not any(out.iterdir())
    if out.exists() and not (is_empty or (overwrite and (out / _CONFIG).is_file())):
        raise UserError(
            f"--out {out} exists: name another folder, or replace that of a model with --overwrite"
        )
    if not out.parent.is_dir():
        raise UserError(f"--out {out}: the folder {out.parent} does not exist")
