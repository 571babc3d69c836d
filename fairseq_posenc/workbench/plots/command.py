"""``fairseq-posenc plot``: draws the position encodings of a checkpoint or of an untrained spec.

Each kind of picture is a subcommand, such as ``plot table``. ``Any`` is matplotlib's Figure:
matplotlib is optional.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fairseq_posenc.errors import UserError, how_to_install
from fairseq_posenc.files import refuse_bad_place
from fairseq_posenc.workbench.plots import distances, tables
from fairseq_posenc.workbench.plots.grids import draw_attention
from fairseq_posenc.workbench.plots.inspection import STACKS, group_by_kind
from fairseq_posenc.workbench.plots.subject import (
    Subject,
    build_untrained_subject,
    collect_trained_subjects,
)
from fairseq_posenc.workbench.results import pictures
from fairseq_posenc.workbench.running.options import add_count, add_data
from fairseq_posenc.workbench.running.progress import say

_FORMATS = (".png", ".svg")
_SIZES = {"embed_dim": 256, "heads": 4, "max_positions": 128}  # default sizes of an untrained spec
# Kinds of pictures of encodings, and what they show.
KINDS: dict[str, tuple[Callable[[Subject], Any], str]] = {
    "table": (tables.draw_tables, "heat maps of tables, by position or distance"),
    "map": (tables.draw_map, "tables in two dimensions, where near rows are alike"),
    "products": (
        distances.draw_products,
        "dot products of input vectors by distance: as they are, after random projections, and "
        "after the model's",
    ),
    "decay": (distances.draw_decay, "the upper bound of rope's scores by distance"),
    "scores": (distances.draw_scores, "scores, biases and gains by distance, head and layer"),
}
TEXT_KINDS = {
    "attention": "attention to a text, by layer and head",
    "distance": "mean attention to a text by distance",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the kinds of pictures, each with its options."""
    parsers = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    models = "a masked LM, causal LM or translation model"
    for name, text in {**{name: text for name, (_, text) in KINDS.items()}, **TEXT_KINDS}.items():
        kind = parsers.add_parser(name, help=text, description=text)
        add = kind.add_argument
        kind.set_defaults(layer=None, head=None)
        stacks = ["encoder", "decoder"]
        if name in TEXT_KINDS:
            add("--checkpoint", type=Path, required=True, metavar="FILE", help=models)
            add("--text", required=True, help="text that the model reads")
            add("--target", metavar="TEXT", help="the translation (default: the model's own)")
            stacks.append("cross")
        else:
            source = kind.add_mutually_exclusive_group(required=True)
            source.add_argument("--checkpoint", type=Path, metavar="FILE", help=models)
            source.add_argument("--encoding", metavar="SPEC", help="draw an untrained SPEC instead")
            for size, default in _SIZES.items():
                option = f"--{size.replace('_', '-')}"
                add_count(kind, option, f"size for SPEC (default: {default})")
            add("--decoder", action="store_true", help="draw SPEC in a causal stack")
        add("--out", type=Path, required=True, metavar="FILE", help="the picture, .png or .svg")
        add_data(kind, "directory with its dictionaries (default: that of the training)")
        add("--stack", choices=stacks, help="default: the model's first")
        for option in ("--layer", "--head") if name != "decay" else ():  # the same in all of them
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
        draw, _ = KINDS[args.kind]
        figure = draw(_find_subject(args))
    pictures.save(figure, args.out)
    say(f"wrote {args.out}")
    return 0


def _find_subject(args: argparse.Namespace) -> Subject:
    """Find the layers and heads to show: of the checkpoint, or of an untrained spec."""
    if args.checkpoint:
        from fairseq_posenc.workbench.loading.open_model import open_model

        for option in filter(vars(args).get, (*_SIZES, "decoder")):
            name = option.replace("_", "-")
            raise UserError(f"--{name} is for --encoding: a checkpoint has its own sizes")
        subjects = collect_trained_subjects(open_model(args.checkpoint, args.data).model)
        if not subjects:
            raise UserError(
                f"--checkpoint {args.checkpoint}: fairseq's own model; only its attention to a "
                "text can be shown"
            )
        subject = subjects[_choose_stack(args.checkpoint, list(subjects), args.stack)]
        subject = replace(subject, label=f" in {_shorten_path(args.checkpoint)}")
    else:
        width, heads, length = (getattr(args, size) or _SIZES[size] for size in _SIZES)
        subject = build_untrained_subject(args.encoding, width, heads, length, args.decoder)
        if args.stack not in (None, subject.stack):
            raise UserError(f"--stack {args.stack}: --encoding has only the {subject.stack}")
    layers = _choose_numbers(args.layer, len(subject.layers), "layer", subject.title)
    shown = _choose_numbers(args.head, len(subject.heads), "head", subject.title)
    return replace(subject, layers=layers, heads=shown)


def _draw_text(args: argparse.Namespace) -> Any:
    """Draw the attention of a checkpoint to the text, by pair or by distance."""
    from fairseq_posenc.transformer.capture_attention import capture_attention
    from fairseq_posenc.workbench.loading.open_model import open_model
    from fairseq_posenc.workbench.plots.model_inputs import prepare_input

    opened = open_model(args.checkpoint, args.data)
    prepared = prepare_input(opened, args.text, args.target)
    by_kind = group_by_kind(capture_attention(opened.model, prepared.run))
    kind = _choose_stack(args.checkpoint, list(by_kind), args.stack)
    name = _shorten_path(args.checkpoint)
    numbers = _choose_numbers(args.layer, len(by_kind[kind]), "layer", name)
    layers = [by_kind[kind][number] for number in numbers]
    heads = _choose_numbers(args.head, layers[0].weights.size(1), "head", name)
    title = f"{kind} attention in {name}"
    if args.kind == "distance":
        return distances.draw_distance(layers, heads, f"{title}, by distance")
    queries, keys = (prepared.labels[stack] for stack in STACKS[kind])
    return draw_attention(layers, heads, queries, keys, title)


def _choose_stack(path: Path, stacks: Sequence[str], name: str | None) -> str:
    """Choose a stack, or kind of attention, by the name in ``--stack``; by default the first."""
    if name and name not in stacks:
        raise UserError(f"--stack {name}: --checkpoint {path} has {' and '.join(stacks)} only")
    return name or stacks[0]


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
