"""Defines ``fairseq-posenc swap``, which gives a trained model other positions."""

from __future__ import annotations

import argparse
from pathlib import Path

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.convert.swap.hf_folder import CONFIG, swap_folder
from fairseq_posenc.workbench.running.hub import find_model
from fairseq_posenc.workbench.running.options import add_count

# The options that change a model; at least one is needed.
_CHANGES = (
    "position_encoding",
    "position_encoding_decoder",
    "attention_directions",
    "max_positions",
    "arch",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = parser.add_argument
    text = "a trained RoBERTa, causal language model or translation model, fairseq's or ours; or a "
    text += "folder of a model of transformers"
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
    if (options.checkpoint / CONFIG).is_file():
        lines = swap_folder(options)
    else:  # imported only here: folders of transformers need no fairseq
        from fairseq_posenc.workbench.convert.swap.fairseq_checkpoint import swap_checkpoint

        lines = swap_checkpoint(options)
    print("\n".join(lines))
    return 0
