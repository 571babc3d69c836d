"""``fairseq-posenc plot``: draws the position encodings of a checkpoint or of an untrained spec.

Each kind of picture is a subcommand, such as ``plot table``. Its function returns matplotlib's
Figure, ``Any`` here: matplotlib is optional.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairseq_posenc.errors import UserError, how_to_install
from fairseq_posenc.files import refuse_bad_place
from fairseq_posenc.workbench.plots import attention, distances, tables
from fairseq_posenc.workbench.plots.stacks import PlottedStack, build_untrained_stack
from fairseq_posenc.workbench.results import pictures
from fairseq_posenc.workbench.running.options import add_count, add_data
from fairseq_posenc.workbench.running.progress import say

_FORMATS = (".png", ".svg")
_SIZES = {"embed_dim": 256, "heads": 4, "max_positions": 128}  # default sizes of an untrained spec


@dataclass(frozen=True)
class Subject:
    """The layers and heads of a stack that a picture shows."""

    stack: PlottedStack
    model: Any  # model of the stack; None for an untrained spec
    layers: list[int]  # indices of the layers, from 0
    heads: list[int]  # indices of the heads, from 0
    name: str  # name in titles


@dataclass(frozen=True)
class Kind:
    """A kind of picture: a subcommand of ``plot``."""

    help: str
    draw: Callable[[argparse.Namespace], Any]  # returns the Figure
    reads_text: bool = False  # whether it shows a checkpoint's attention to --text
    reach: int = 0  # default of --reach, the largest distance; 0 without that option
    layers: str = "all"  # default of --layer; empty if there is no choice of layers and heads


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the kinds of pictures, each with its options."""
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    for name, kind in KINDS.items():
        _add_options(kinds.add_parser(name, help=kind.help, description=kind.help), kind)


def run(args: argparse.Namespace) -> int:
    """Draw the picture; return the exit code.

    Raises:
        UserError: wrong input, or matplotlib is missing.
    """
    kind = KINDS[args.kind]
    if args.out.suffix not in _FORMATS:
        raise UserError(f"--out {args.out}: name a file that ends in {' or '.join(_FORMATS)}")
    refuse_bad_place(args.out, "--out")
    if not kind.reads_text:
        _check_source(args)
    if not pictures.can_draw():
        raise UserError(f"pictures need matplotlib: {how_to_install('plot')}")
    pictures.save(kind.draw(args), args.out)
    say(f"wrote {args.out}")
    return 0


def _add_options(parser: argparse.ArgumentParser, kind: Kind) -> None:
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="FILE", help="the picture, .png or .svg")
    models = "a masked LM, causal LM or translation model"
    add("--checkpoint", type=Path, required=kind.reads_text, metavar="FILE", help=models)
    add_data(parser, "directory with its dictionaries (default: that of the training)")
    stacks = ["encoder", "decoder"]
    if kind.reads_text:
        add("--text", required=True, help="text that the model reads")
        add("--target", metavar="TEXT", help="the translation (default: the model's own)")
        stacks.append("cross")
    else:
        add("--encoding", metavar="SPEC", help="draw an untrained SPEC instead of a checkpoint")
        for size, default in _SIZES.items():
            option = f"--{size.replace('_', '-')}"
            add_count(parser, option, f"size for SPEC (default: {default})")
        add("--decoder", action="store_true", help="draw SPEC in a causal stack")
    add("--stack", choices=stacks, help="default: the model's first")
    parser.set_defaults(layer=None, head=None)  # None for all, also without these options
    if kind.layers:
        for option, shown in ("--layer", kind.layers), ("--head", "all"):
            numbers = f"counted from 1 (default: {shown})"
            add(option, type=int, nargs="+", metavar="N", help=numbers)
    if kind.reach:
        add_count(parser, "--reach", "the largest distance", kind.reach)


def _check_source(args: argparse.Namespace) -> None:
    """Refuse options that do not go together."""
    if bool(args.checkpoint) == bool(args.encoding):  # neither or both
        both = ", not both" if args.checkpoint else ""
        raise UserError(f"plot {args.kind}: name --checkpoint or --encoding{both}")
    spec_options = [name for name in (*_SIZES, "decoder") if getattr(args, name)]
    if args.checkpoint and spec_options:
        option = spec_options[0].replace("_", "-")
        raise UserError(f"--{option} is for --encoding: a checkpoint has its own sizes")


def _draw_tables(args: argparse.Namespace) -> Any:
    subject = _find_subject(args)
    collected = tables.collect_tables(subject.stack, subject.layers, subject.heads)
    if args.kind == "map":
        return tables.draw_map(collected, f"{subject.name}: near rows are alike")
    return tables.draw_tables(collected, subject.name)


def _draw_products(args: argparse.Namespace) -> Any:
    subject = _find_subject(args)
    title = f"{subject.name}: products of input vectors at distance k"
    return distances.draw_products(subject.stack, subject.layers, subject.heads, args.reach, title)


def _draw_decay(args: argparse.Namespace) -> Any:
    subject = _find_subject(args)
    title = f"{subject.name}: decay with the distance"
    return distances.draw_decay(subject.stack, args.reach, title)


def _draw_scores(args: argparse.Namespace) -> Any:
    subject = _find_subject(args)
    captured = []
    if subject.model:
        length = 2 * args.reach  # enough for many pairs at each distance
        captured = _import_trained().attention_to_random_symbols(subject.model, length)
    curves = distances.compute_curves(
        subject.stack, subject.layers, subject.heads, args.reach, captured
    )
    return distances.draw_curves(curves, subject.heads, subject.name)


def _draw_attention(args: argparse.Namespace) -> Any:
    """Draw the attention of a checkpoint to the text, by pair or by distance."""
    stack, maps = _import_trained().attention_to_text(
        args.checkpoint, args.data, args.text, args.target, args.stack
    )
    name = _shorten_path(args.checkpoint)
    layers = _choose_numbers(args.layer, len(maps.layers), "layer", name)
    heads = _choose_numbers(args.head, len(maps.heads), "head", name)
    title = f"{stack} attention in {name}"
    if args.kind == "distance":
        return attention.draw_distance(maps.select(layers, heads), f"{title}, by distance")
    return attention.draw_attention(maps.select(layers, heads), title)


KINDS = {
    "table": Kind("heat maps of tables, by position or distance", _draw_tables),
    "map": Kind("tables in two dimensions, where near rows are alike", _draw_tables),
    "products": Kind(
        "dot products of input vectors by distance: as they are, after random projections, and "
        "after the model's",
        _draw_products,
        reach=48,
        layers="the first",
    ),
    "decay": Kind(
        "the upper bound of rope's scores by distance", _draw_decay, reach=256, layers=""
    ),
    "scores": Kind("scores, biases and gains by distance, head and layer", _draw_scores, reach=32),
    "attention": Kind("attention to a text, by layer and head", _draw_attention, reads_text=True),
    "distance": Kind("mean attention to a text by distance", _draw_attention, reads_text=True),
}


def _find_subject(args: argparse.Namespace) -> Subject:
    """Find the stack to show: of the checkpoint, or of an untrained spec."""
    model = None
    if args.checkpoint:
        stack, model = _import_trained().open_stack(args.checkpoint, args.data, args.stack)
        name = f"{stack.spec} in {_shorten_path(args.checkpoint)}"
    else:
        width, heads, length = (getattr(args, size) or _SIZES[size] for size in _SIZES)
        stack = build_untrained_stack(args.encoding, width, heads, length, args.decoder)
        if args.stack not in (None, stack.name):
            raise UserError(f"--stack {args.stack}: --encoding has only the {stack.name}")
        has_parameters = next(stack.layers[0].parameters(), None) is not None
        name = f"{stack.spec}, before training" if has_parameters else stack.spec
    layers = _choose_numbers(args.layer, len(stack.layers), "layer", name)
    if not args.layer and KINDS[args.kind].layers == "the first":
        layers = layers[:1]
    chosen_heads = _choose_numbers(args.head, stack.dims.num_heads, "head", name)
    return Subject(stack, model, layers, chosen_heads, name)


def _choose_numbers(numbers: Sequence[int] | None, count: int, part: str, name: str) -> list[int]:
    """Convert numbers of ``--layer`` or ``--head``, from 1, to indices, from 0; None means all.

    Raises:
        UserError: a number is above ``count``, which the model ``name`` has of this part.
    """
    for number in numbers or ():
        if not 1 <= number <= count:
            raise UserError(f"--{part} {number}: {name} has {part}s 1 to {count}")
    return [number - 1 for number in numbers] if numbers else list(range(count))


def _import_trained() -> Any:
    """Import the module that opens checkpoints; it needs fairseq, which specs do not."""
    from fairseq_posenc.workbench.plots import trained

    return trained


def _shorten_path(path: Path) -> str:
    """Shorten a path to the file and the two folders above it, which distinguish trainings."""
    return "/".join(path.resolve().parts[-3:])
