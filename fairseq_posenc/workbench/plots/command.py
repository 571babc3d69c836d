"""``fairseq-posenc plot``: draws the position encodings of a checkpoint or of an untrained spec.

Each kind of picture is a subcommand, such as ``plot table``. ``Any`` is matplotlib's Figure:
matplotlib is optional.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairseq_posenc.errors import UserError, how_to_install
from fairseq_posenc.files import refuse_bad_place
from fairseq_posenc.workbench.plots import distances, tables
from fairseq_posenc.workbench.plots.attention import draw_attention, draw_distance
from fairseq_posenc.workbench.plots.stacks import PlottedStack, build_untrained_stack
from fairseq_posenc.workbench.plots.user_dir import add_user_dir, import_user_dir
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
    reach: int  # the largest distance


@dataclass(frozen=True)
class Kind:
    """The options of a kind of picture, a subcommand of ``plot``."""

    help: str
    reads_text: bool = False  # whether it shows a checkpoint's attention to --text
    reach: int = 0  # default of --reach, the largest distance; 0 without that option
    layers: str = "all"  # default of --layer; empty if there is no choice of layers and heads


KINDS = {
    "table": Kind("heat maps of tables, by position or distance"),
    "map": Kind("tables in two dimensions, where near rows are alike"),
    "products": Kind(
        "dot products of input vectors by distance: as they are, after random projections, and "
        "after the model's",
        reach=48,
        layers="the first",
    ),
    "decay": Kind("the upper bound of rope's scores by distance", reach=256, layers=""),
    "scores": Kind("scores, biases and gains by distance, head and layer", reach=32),
    "attention": Kind("attention to a text, by layer and head", reads_text=True),
    "distance": Kind("mean attention to a text by distance", reads_text=True),
}


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
    if not pictures.can_draw():
        raise UserError(f"pictures need matplotlib: {how_to_install('plot')}")
    import_user_dir(args.user_dir)
    if kind.reads_text:
        figure = _draw_attention(args)
    else:
        figure = _draw_stack(args.kind, _find_subject(args, kind))
    pictures.save(figure, args.out)
    say(f"wrote {args.out}")
    return 0


def _add_options(parser: argparse.ArgumentParser, kind: Kind) -> None:
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="FILE", help="the picture, .png or .svg")
    models = "a masked LM, causal LM or translation model"
    stacks = ["encoder", "decoder"]
    if kind.reads_text:
        add("--checkpoint", type=Path, required=True, metavar="FILE", help=models)
        add("--text", required=True, help="text that the model reads")
        add("--target", metavar="TEXT", help="the translation (default: the model's own)")
        stacks.append("cross")
    else:
        source = parser.add_mutually_exclusive_group(required=True)
        source.add_argument("--checkpoint", type=Path, metavar="FILE", help=models)
        source.add_argument("--encoding", metavar="SPEC", help="draw an untrained SPEC instead")
        for size, default in _SIZES.items():
            option = f"--{size.replace('_', '-')}"
            add_count(parser, option, f"size for SPEC (default: {default})")
        add("--decoder", action="store_true", help="draw SPEC in a causal stack")
    add_data(parser, "directory with its dictionaries (default: that of the training)")
    add_user_dir(parser)
    add("--stack", choices=stacks, help="default: the model's first")
    parser.set_defaults(layer=None, head=None)  # None for all, also without these options
    if kind.layers:
        for option, shown in ("--layer", kind.layers), ("--head", "all"):
            numbers = f"counted from 1 (default: {shown})"
            add(option, type=int, nargs="+", metavar="N", help=numbers)
    parser.set_defaults(reach=0)
    if kind.reach:
        add_count(parser, "--reach", "the largest distance", kind.reach)


def _draw_stack(kind: str, subject: Subject) -> Any:
    """Draw a picture of the encodings of a stack."""
    stack, layers, heads = subject.stack, subject.layers, subject.heads
    name, reach = subject.name, subject.reach
    if kind == "products":
        title = f"{name}: products of input vectors at distance k"
        return distances.draw_products(stack, layers, heads, reach, title)
    if kind == "decay":
        return distances.draw_decay(stack, reach, f"{name}: decay with the distance")
    if kind == "scores":
        captured = []
        if subject.model:
            from fairseq_posenc.workbench.plots.trained import attention_to_random_symbols

            # A length that has many pairs at each distance.
            captured = attention_to_random_symbols(subject.model, 2 * reach)
        curves = distances.compute_curves(stack, layers, heads, reach, captured)
        return distances.draw_curves(curves, heads, name)
    collected = tables.collect_tables(stack, layers, heads)
    if kind == "map":
        return tables.draw_map(collected, f"{name}: near rows are alike")
    return tables.draw_tables(collected, name)


def _find_subject(args: argparse.Namespace, kind: Kind) -> Subject:
    """Find the stack to show: of the checkpoint, or of an untrained spec."""
    model = None
    if args.checkpoint:
        from fairseq_posenc.workbench.plots.trained import open_stack

        for option in filter(vars(args).get, (*_SIZES, "decoder")):
            name = option.replace("_", "-")
            raise UserError(f"--{name} is for --encoding: a checkpoint has its own sizes")
        stack, model = open_stack(args.checkpoint, args.data, args.stack)
        name = f"{stack.spec} in {_shorten_path(args.checkpoint)}"
    else:
        width, heads, length = (getattr(args, size) or _SIZES[size] for size in _SIZES)
        stack = build_untrained_stack(args.encoding, width, heads, length, args.decoder)
        if args.stack not in (None, stack.name):
            raise UserError(f"--stack {args.stack}: --encoding has only the {stack.name}")
        has_parameters = next(stack.layers[0].parameters(), None) is not None
        name = f"{stack.spec}, before training" if has_parameters else stack.spec
    layers = _choose_numbers(args.layer, len(stack.layers), "layer", name)
    if not args.layer and kind.layers == "the first":
        layers = layers[:1]
    chosen_heads = _choose_numbers(args.head, stack.dims.num_heads, "head", name)
    return Subject(stack, model, layers, chosen_heads, name, args.reach)


def _draw_attention(args: argparse.Namespace) -> Any:
    """Draw the attention of a checkpoint to the text, by pair or by distance."""
    from fairseq_posenc.workbench.plots.trained import attention_to_text

    stack, maps = attention_to_text(args.checkpoint, args.data, args.text, args.target, args.stack)
    name = _shorten_path(args.checkpoint)
    layers = _choose_numbers(args.layer, len(maps.layers), "layer", name)
    heads = _choose_numbers(args.head, len(maps.heads), "head", name)
    title = f"{stack} attention in {name}"
    if args.kind == "distance":
        return draw_distance(maps.select(layers, heads), f"{title}, by distance")
    return draw_attention(maps.select(layers, heads), title)


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
