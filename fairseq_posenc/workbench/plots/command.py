"""``fairseq-posenc plot``: draws the position encodings of a checkpoint or of an untrained spec.

Each kind of picture is a subcommand, such as ``plot table``. ``Any`` is matplotlib's Figure:
matplotlib is optional.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from fairseq_posenc.errors import UserError, how_to_install
from fairseq_posenc.files import refuse_bad_place
from fairseq_posenc.workbench.plots import distances, tables
from fairseq_posenc.workbench.plots.attention import draw_attention, draw_distance
from fairseq_posenc.workbench.plots.subject import Subject, build_untrained_subject
from fairseq_posenc.workbench.results import pictures
from fairseq_posenc.workbench.running.options import add_count, add_data
from fairseq_posenc.workbench.running.progress import say

_FORMATS = (".png", ".svg")
_SIZES = {"embed_dim": 256, "heads": 4, "max_positions": 128}  # default sizes of an untrained spec


class Kind(NamedTuple):
    """A kind of picture of encodings, a subcommand of ``plot``."""

    draw: Callable[[Subject], Any]
    help: str
    reach: int = 0  # default of --reach, the largest distance; 0 without that option
    of_layers: bool = True  # whether it has panels or lines of layers and heads


KINDS = {
    "table": Kind(tables.draw_tables, "heat maps of tables, by position or distance"),
    "map": Kind(tables.draw_map, "tables in two dimensions, where near rows are alike"),
    "products": Kind(
        distances.draw_products,
        "dot products of input vectors by distance: as they are, after random projections, and "
        "after the model's",
        reach=48,
    ),
    "decay": Kind(
        distances.draw_decay,
        "the upper bound of rope's scores by distance",
        reach=256,
        of_layers=False,
    ),
    "scores": Kind(
        distances.draw_scores, "scores, biases and gains by distance, head and layer", reach=32
    ),
}
TEXT_KINDS = {
    "attention": "attention to a text, by layer and head",
    "distance": "mean attention to a text by distance",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the kinds of pictures, each with its options."""
    parsers = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    models = "a masked LM, causal LM or translation model"
    for name, kind in KINDS.items():
        of_spec = parsers.add_parser(name, help=kind.help, description=kind.help)
        source = of_spec.add_mutually_exclusive_group(required=True)
        source.add_argument("--checkpoint", type=Path, metavar="FILE", help=models)
        source.add_argument("--encoding", metavar="SPEC", help="draw an untrained SPEC instead")
        for size, default in _SIZES.items():
            option = f"--{size.replace('_', '-')}"
            add_count(of_spec, option, f"size for SPEC (default: {default})")
        of_spec.add_argument("--decoder", action="store_true", help="draw SPEC in a causal stack")
        of_spec.set_defaults(reach=0)
        if kind.reach:
            add_count(of_spec, "--reach", "the largest distance", kind.reach)
        _add_common(of_spec, ["encoder", "decoder"], kind.of_layers)
    for name, text in TEXT_KINDS.items():
        of_text = parsers.add_parser(name, help=text, description=text)
        add = of_text.add_argument
        add("--checkpoint", type=Path, required=True, metavar="FILE", help=models)
        add("--text", required=True, help="text that the model reads")
        add("--target", metavar="TEXT", help="the translation (default: the model's own)")
        _add_common(of_text, ["encoder", "decoder", "cross"], of_layers=True)


def _add_common(parser: argparse.ArgumentParser, stacks: list[str], of_layers: bool) -> None:
    """Add the options that kinds share."""
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="FILE", help="the picture, .png or .svg")
    add_data(parser, "directory with its dictionaries (default: that of the training)")
    add("--stack", choices=stacks, help="default: the model's first")
    parser.set_defaults(layer=None, head=None)
    for option in ("--layer", "--head") if of_layers else ():
        add(option, type=int, nargs="+", metavar="N", help="counted from 1 (default: all)")


def run(args: argparse.Namespace) -> int:
    """Draw the picture; return the exit code.

    Raises:
        UserError: wrong input, or matplotlib is missing.
    """
    if args.out.suffix not in _FORMATS:
        raise UserError(f"--out {args.out}: name a file that ends in {' or '.join(_FORMATS)}")
    refuse_bad_place(args.out, "--out")
    if not pictures.can_draw():
        raise UserError(f"pictures need matplotlib: {how_to_install('plot')}")
    if args.kind in TEXT_KINDS:
        figure = _draw_text(args)
    else:
        figure = KINDS[args.kind].draw(_find_subject(args))
    pictures.save(figure, args.out)
    say(f"wrote {args.out}")
    return 0


def _find_subject(args: argparse.Namespace) -> Subject:
    """Find the layers and heads to show: of the checkpoint, or of an untrained spec."""
    if args.checkpoint:
        from fairseq_posenc.workbench.plots.trained import open_subject

        for option in filter(vars(args).get, (*_SIZES, "decoder")):
            name = option.replace("_", "-")
            raise UserError(f"--{name} is for --encoding: a checkpoint has its own sizes")
        subject = open_subject(args.checkpoint, args.data, args.stack)
        subject = replace(subject, label=f" in {_shorten_path(args.checkpoint)}")
    else:
        width, heads, length = (getattr(args, size) or _SIZES[size] for size in _SIZES)
        subject = build_untrained_subject(args.encoding, width, heads, length, args.decoder)
        if args.stack not in (None, subject.stack):
            raise UserError(f"--stack {args.stack}: --encoding has only the {subject.stack}")
    layers = _choose_numbers(args.layer, len(subject.layers), "layer", subject.title)
    shown = _choose_numbers(args.head, len(subject.heads), "head", subject.title)
    return replace(subject, layers=layers, heads=shown, reach=args.reach)


def _draw_text(args: argparse.Namespace) -> Any:
    """Draw the attention of a checkpoint to the text, by pair or by distance."""
    from fairseq_posenc.workbench.plots.trained import read_text

    read = read_text(args.checkpoint, args.data, args.text, args.target, args.stack)
    name = _shorten_path(args.checkpoint)
    numbers = _choose_numbers(args.layer, len(read.layers), "layer", name)
    layers = [read.layers[number] for number in numbers]
    heads = _choose_numbers(args.head, layers[0].weights.size(1), "head", name)
    title = f"{read.kind} attention in {name}"
    if args.kind == "distance":
        return draw_distance(layers, heads, f"{title}, by distance")
    return draw_attention(layers, heads, read.queries, read.keys, title)


def _choose_numbers(numbers: Sequence[int] | None, count: int, part: str, name: str) -> list[int]:
    """Convert numbers of ``--layer`` or ``--head``, from 1, to indices, from 0; None means all.

    Raises:
        UserError: a number is above ``count``, which the model ``name`` has of this part.
    """
    for number in numbers or ():
        if not 1 <= number <= count:
            raise UserError(f"--{part} {number}: {name} has {part}s 1 to {count}")
    return [number - 1 for number in numbers] if numbers else list(range(count))


def _shorten_path(path: Path) -> str:
    """Shorten a path to the file and the two folders above it, which distinguish trainings."""
    return "/".join(path.resolve().parts[-3:])
