"""``fairseq-posenc plot``: pictures of what positions do, in a checkpoint or from a spec alone."""

from __future__ import annotations

import argparse
from pathlib import Path

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.plots.kinds import KINDS, SIZES, Kind
from fairseq_posenc.workbench.results import pictures
from fairseq_posenc.workbench.running.options import add_count, add_data
from fairseq_posenc.workbench.running.progress import say

_FORMATS = (".png", ".svg")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the kinds of pictures, each with its options."""
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    for name, kind in KINDS.items():
        _add_options(kinds.add_parser(name, help=kind.help, description=kind.help), kind)


def run(args: argparse.Namespace) -> int:
    """Draw the picture; return the exit code.

    Raises:
        UserError: wrong input, or no matplotlib.
    """
    kind = KINDS[args.kind]
    if args.out.suffix not in _FORMATS:
        raise UserError(f"--out {args.out}: name a file that ends in {' or '.join(_FORMATS)}")
    if not args.out.parent.is_dir() or args.out.is_dir():
        raise UserError(f"--out {args.out}: name a file in a folder that there is")
    _check_source(args, kind)
    if not pictures.can_draw():
        raise UserError("pictures need matplotlib: pip install 'fairseq-posenc[plot]'")
    pictures.save(kind.draw(args), args.out)
    say(f"wrote {args.out}")
    return 0


def _add_options(parser: argparse.ArgumentParser, kind: Kind) -> None:
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="FILE", help="the picture, .png or .svg")
    add(
        "--checkpoint",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="a masked LM, causal LM or translation model"
        + ("; twice: the second is taken from the first" if kind.checkpoints == 2 else ""),
    )
    add_data(parser, "with its dictionaries (default: the one that it was trained on)")
    if kind.of_spec:
        add("--encoding", metavar="SPEC", help="in place of a checkpoint: as before training")
        for size, default in SIZES.items():
            text = f"of the SPEC (default: {default})"
            add_count(parser, f"--{size.replace('_', '-')}", text)
        add("--decoder", action="store_true", help="take the SPEC for that of a causal stack")
    if kind.text != "no":
        add("--text", required=kind.text == "must", help="what the model reads")
        add("--target", metavar="TEXT", help="the translation (default: the model's own)")
    stacks = ["encoder", "decoder", *(["cross"] if kind.text != "no" else [])]
    add("--stack", choices=stacks, help="default: the first that there is")
    for option in ("--layer", "--head"):
        add(option, type=int, nargs="+", metavar="N", help="counted from 1 (default: all)")
    if kind.reach:
        add_count(parser, "--reach", "the largest distance", kind.reach)


def _check_source(args: argparse.Namespace, kind: Kind) -> None:
    """Refuse options that do not go together."""
    given, spec = len(args.checkpoint), getattr(args, "encoding", None)
    if bool(given) == bool(spec):
        options = "--checkpoint or --encoding" if kind.of_spec else "--checkpoint"
        raise UserError(f"plot {args.kind}: name {options}" + (", not both" if given else ""))
    if given and given != kind.checkpoints:
        raise UserError(f"plot {args.kind}: {given} --checkpoint; it is of {kind.checkpoints}")
    sizes = [size for size in (*SIZES, "decoder") if getattr(args, size, None)]
    if given and sizes:
        option = sizes[0].replace("_", "-")
        raise UserError(f"--{option} goes with --encoding: a checkpoint has sizes of its own")
