"""The kinds of pictures, each drawn from the options of its command."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.plots import (
    attention,
    curves,
    decay,
    differences,
    maps,
    products,
    tables,
)
from fairseq_posenc.workbench.plots.stacks import Stack, numbered, of_spec

SIZES = {"embed_dim": 256, "heads": 4, "max_positions": 128}


class Kind(NamedTuple):
    """A kind of picture.

    Attributes:
        help: what it shows.
        draw: returns the Figure.
        checkpoints: how many it is of.
        of_spec: whether a spec is enough.
        text: whether a model reads something for it: ``no``, ``can``, ``must``.
        reach: the largest distance by default; 0 where there is no such choice.
    """

    help: str
    draw: Callable[[argparse.Namespace], Any]
    checkpoints: int = 1
    of_spec: bool = True
    text: str = "no"
    reach: int = 0


class Subject(NamedTuple):
    """The positions that a picture is of.

    Attributes:
        stack: of layers.
        model: that the stack is a part of; None for a spec alone.
        layers: chosen, counted from 0.
        heads: likewise.
        name: for titles.
    """

    stack: Stack
    model: Any
    layers: list[int]
    heads: list[int]
    name: str


def _table(args: argparse.Namespace) -> Any:
    subject = _subject(args)
    return tables.draw_tables(_tables(subject), subject.name)


def _map(args: argparse.Namespace) -> Any:
    subject = _subject(args)
    return maps.draw_map(_tables(subject), f"{subject.name}: near rows are alike")


def _products(args: argparse.Namespace) -> Any:
    stack, _, layers, heads, name = _subject(args)
    title = f"{name}: products of input vectors k apart"
    return products.draw_products(stack, layers if args.layer else [0], heads, args.reach, title)


def _decay(args: argparse.Namespace) -> Any:
    subject = _subject(args)
    return decay.draw_decay(subject.stack, args.reach, f"{subject.name}: decay with the distance")


def _scores(args: argparse.Namespace) -> Any:
    stack, model, layers, heads, name = _subject(args)
    seen = _trained().attention_to_random_symbols(model, 2 * args.reach) if model else []
    found = curves.curves_of(stack, layers, heads, args.reach, seen)
    return curves.draw_curves(found, heads, name)


def _attention(args: argparse.Namespace) -> Any:
    maps, title = _maps(args, args.checkpoint[0])
    return attention.draw_attention(maps, title)


def _distance(args: argparse.Namespace) -> Any:
    maps, title = _maps(args, args.checkpoint[0])
    return attention.draw_distance(maps, f"{title}, by distance")


def _difference(args: argparse.Namespace) -> Any:
    path, other = args.checkpoint
    if args.text:
        (maps, title), (others, _) = _maps(args, path), _maps(args, other)
        change = differences.maps_less(maps, others)
        return attention.draw_attention(change, f"{title} less {_named(other)}", signed=True)
    ours, theirs = (_in_checkpoint(args, each) for each in (path, other))
    less = differences.tables_less(_tables(ours), _tables(theirs))
    return tables.draw_tables(less, f"{ours.name} less {_named(other)}")


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
        _difference,
        2,
        False,
        "can",
    ),
}


def _subject(args: argparse.Namespace) -> Subject:
    """Return what a picture of one stack is of: a checkpoint, or a spec as before training."""
    if args.checkpoint:
        return _in_checkpoint(args, args.checkpoint[0])
    width, heads, length = (getattr(args, size) or default for size, default in SIZES.items())
    stack = of_spec(args.encoding, width, heads, length, args.decoder)
    if args.stack not in (None, stack.name):
        raise UserError(f"--stack {args.stack}: --encoding has one, the {stack.name}")
    trains = any(True for _ in stack.layers[0].parameters())
    return _chosen(args, stack, None, f"{stack.spec}, before training" if trains else stack.spec)


def _in_checkpoint(args: argparse.Namespace, path: Path) -> Subject:
    stack, model = _trained().open_stack(path, args.data, args.stack)
    return _chosen(args, stack, model, f"{stack.spec} in {_named(path)}")


def _chosen(args: argparse.Namespace, stack: Stack, model: Any, name: str) -> Subject:
    layers = numbered(args.layer, len(stack.layers), "layer", name)
    return Subject(stack, model, layers, numbered(args.head, stack.num_heads, "head", name), name)


def _tables(subject: Subject) -> list[tables.Table]:
    return tables.tables_of(subject.stack, subject.layers, subject.heads)


def _maps(args: argparse.Namespace, path: Path) -> tuple[attention.Maps, str]:
    """Return the attention of a checkpoint to the text, and a title."""
    kind, seen, queries, keys = _trained().attention_to_text(
        path, args.data, args.text, args.target, args.stack
    )
    layers = numbered(args.layer, len(seen), "layer", _named(path))
    heads = numbered(args.head, seen[0].weights.size(1), "head", _named(path))
    found = attention.maps_of(seen, layers, heads, queries, keys)
    return found, f"{kind} attention in {_named(path)}"


def _trained() -> Any:
    """Return the module for checkpoints, which brings fairseq: a spec's pictures do without."""
    from fairseq_posenc.workbench.plots import trained

    return trained


def _named(path: Path) -> str:
    """Return a file as titles name it, with the folders that tell trainings apart."""
    return "/".join(path.resolve().parts[-3:])
