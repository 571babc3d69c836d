"""``fairseq-posenc plot``: pictures of what positions do, in a checkpoint or from a spec alone."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.plots import attention, distances, tables
from fairseq_posenc.workbench.plots.stacks import Stack, choose_numbers, of_spec
from fairseq_posenc.workbench.results import pictures
from fairseq_posenc.workbench.running.options import add_count, add_data
from fairseq_posenc.workbench.running.progress import say

_FORMATS = (".png", ".svg")
_SIZES = {"embed_dim": 256, "heads": 4, "max_positions": 128}  # of a spec's layers


class Kind(NamedTuple):
    """A kind of picture."""

    help: str  # what it shows
    draw: Callable[[argparse.Namespace], Any]  # makes the Figure
    checkpoints: int = 1  # how many it is of
    from_spec: bool = True  # whether a spec is enough
    text: str = "no"  # whether a model reads something for it: `no`, `can`, `must`
    reach: int = 0  # the largest distance by default; 0 where there is no such choice


class Subject(NamedTuple):
    """The positions that a picture is of."""

    stack: Stack  # of layers
    model: Any  # that the stack is a part of; None for a spec alone
    layers: list[int]  # chosen, counted from 0, as heads are
    heads: list[int]  # likewise
    name: str  # for titles

    def tables(self) -> list[tables.Table]:
        """Collect the tables of the chosen layers and heads."""
        return tables.tables_of(self.stack, self.layers, self.heads)


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
    refuse_bad_output(args.out)
    _check_source(args, kind)
    if not pictures.can_draw():
        raise UserError("pictures need matplotlib: pip install 'fairseq-posenc[plot]'")
    pictures.save(kind.draw(args), args.out)
    say(f"wrote {args.out}")
    return 0


def refuse_bad_output(out: Path) -> None:
    """Refuse ``--out`` where no file can be.

    Raises:
        UserError: names it.
    """
    if not out.parent.is_dir() or out.is_dir():
        raise UserError(f"--out {out}: name a file in a folder that there is")


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
    add_data(parser, "directory with its dictionaries (default: that of the training)")
    if kind.from_spec:
        add("--encoding", metavar="SPEC", help="in place of a checkpoint: as before training")
        for size, default in _SIZES.items():
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
        options = "--checkpoint or --encoding" if kind.from_spec else "--checkpoint"
        raise UserError(f"plot {args.kind}: name {options}" + (", not both" if given else ""))
    if given and given != kind.checkpoints:
        raise UserError(f"plot {args.kind}: {given} --checkpoint; it is of {kind.checkpoints}")
    sizes = [size for size in (*_SIZES, "decoder") if getattr(args, size, None)]
    if given and sizes:
        option = sizes[0].replace("_", "-")
        raise UserError(f"--{option} goes with --encoding: a checkpoint has sizes of its own")


def _table(args: argparse.Namespace) -> Any:
    subject = _subject(args)
    return tables.draw_tables(subject.tables(), subject.name)


def _map(args: argparse.Namespace) -> Any:
    subject = _subject(args)
    return tables.draw_map(subject.tables(), f"{subject.name}: near rows are alike")


def _products(args: argparse.Namespace) -> Any:
    stack, _, layers, heads, name = _subject(args)
    title = f"{name}: products of input vectors k apart"
    return distances.draw_products(stack, layers if args.layer else [0], heads, args.reach, title)


def _decay(args: argparse.Namespace) -> Any:
    subject = _subject(args)
    title = f"{subject.name}: decay with the distance"
    return distances.draw_decay(subject.stack, args.reach, title)


def _scores(args: argparse.Namespace) -> Any:
    stack, model, layers, heads, name = _subject(args)
    seen = _trained().attention_to_random_symbols(model, 2 * args.reach) if model else []
    found = distances.compute_curves(stack, layers, heads, args.reach, seen)
    return distances.draw_curves(found, heads, name)


def _attention(args: argparse.Namespace) -> Any:
    return attention.draw_attention(*_maps(args, args.checkpoint[0]))


def _distance(args: argparse.Namespace) -> Any:
    maps, title = _maps(args, args.checkpoint[0])
    return attention.draw_distance(maps, f"{title}, by distance")


def _difference(args: argparse.Namespace) -> Any:
    path, other = args.checkpoint
    if args.text:
        (maps, title), (others, _) = _maps(args, path), _maps(args, other)
        title = f"{title} less {_short_path(other)}"
        return attention.draw_attention(maps.subtract(others), title, signed=True)
    ours, theirs = (_in_checkpoint(args, each) for each in (path, other))
    less = tables.subtract_tables(ours.tables(), theirs.tables())
    return tables.draw_tables(less, f"{ours.name} less {_short_path(other)}")


KINDS = {
    "table": Kind("heat maps of tables, by position or distance", _table),
    "map": Kind("tables in two dimensions, where near rows are alike", _map),
    "products": Kind(
        "dot products of input vectors against distance: themselves, after random projections, "
        "after the model's",
        _products,
        reach=48,
    ),
    "decay": Kind("the bound of rope's scores against distance", _decay, reach=256),
    "scores": Kind("scores, biases and gains by distance, head and layer", _scores, reach=32),
    "attention": Kind("attention to a text, by layer and head", _attention, 1, False, "must"),
    "distance": Kind("mean attention to a text by distance", _distance, 1, False, "must"),
    "difference": Kind(
        "tables of one checkpoint less another's; with --text, their attention",
        *(_difference, 2, False, "can"),
    ),
}


def _subject(args: argparse.Namespace) -> Subject:
    """Find what a picture of one stack is of: a checkpoint, or a spec as before training."""
    if args.checkpoint:
        return _in_checkpoint(args, args.checkpoint[0])
    width, heads, length = (getattr(args, size) or default for size, default in _SIZES.items())
    stack = of_spec(args.encoding, width, heads, length, args.decoder)
    if args.stack not in (None, stack.name):
        raise UserError(f"--stack {args.stack}: --encoding has one, the {stack.name}")
    trains = any(True for _ in stack.layers[0].parameters())
    return _chosen(args, stack, None, f"{stack.spec}, before training" if trains else stack.spec)


def _in_checkpoint(args: argparse.Namespace, path: Path) -> Subject:
    stack, model = _trained().open_stack(path, args.data, args.stack)
    return _chosen(args, stack, model, f"{stack.spec} in {_short_path(path)}")


def _chosen(args: argparse.Namespace, stack: Stack, model: Any, name: str) -> Subject:
    layers = choose_numbers(args.layer, len(stack.layers), "layer", name)
    heads = choose_numbers(args.head, stack.dims.num_heads, "head", name)
    return Subject(stack, model, layers, heads, name)


def _maps(args: argparse.Namespace, path: Path) -> tuple[attention.Maps, str]:
    """Compute the attention of a checkpoint to the text; return it with a title."""
    kind, seen, queries, keys = _trained().attention_to_text(
        path, args.data, args.text, args.target, args.stack
    )
    name = _short_path(path)
    layers = choose_numbers(args.layer, len(seen), "layer", name)
    heads = choose_numbers(args.head, seen[0].weights.size(1), "head", name)
    return attention.select_maps(seen, layers, heads, queries, keys), f"{kind} attention in {name}"


def _trained() -> Any:
    """Import the module for checkpoints, which brings fairseq: a spec's pictures do without."""
    from fairseq_posenc.workbench.plots import trained

    return trained


def _short_path(path: Path) -> str:
    """Name a file in a title, with the folders that distinguish trainings."""
    return "/".join(path.resolve().parts[-3:])
