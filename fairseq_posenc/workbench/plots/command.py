"""``fairseq-posenc plot`` draws position encodings; ``inspect`` writes a page of attention.

Each kind of picture is a subcommand, such as ``plot table``. ``Any`` is matplotlib's Figure.
Functions import fairseq or transformers only to read a model of theirs: specs need neither.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fairseq_posenc.errors import UserError
from fairseq_posenc.files import refuse_bad_place, write_whole
from fairseq_posenc.workbench.plots import drawings
from fairseq_posenc.workbench.plots.inspection import STACKS, TextAttention, render_page
from fairseq_posenc.workbench.plots.subject import Subject, build_subject, collect_subjects
from fairseq_posenc.workbench.results import pictures
from fairseq_posenc.workbench.results.record import own_command
from fairseq_posenc.workbench.running.options import add_data, positive_int
from fairseq_posenc.workbench.running.progress import say

_MODELS = "a masked LM, causal LM or translation model of fairseq"
_MODELS_OR_FOLDER = f"{_MODELS}, or a folder of transformers"
# By kind of picture: the function that draws it (None: `_draw_attention` reads a text), its help.
KINDS: dict[str, tuple[Callable[[Subject], Any] | None, str]] = {
    "table": (drawings.draw_tables, "heat maps of tables, by position or distance"),
    "map": (drawings.draw_map, "tables in two dimensions: nearby points are similar rows"),
    "products": (drawings.draw_products, "dot products of input vectors, also projected"),
    "decay": (drawings.draw_decay, "the upper bound on rope's scores by distance"),
    "scores": (drawings.draw_scores, "scores, biases and gains by distance, head and layer"),
    "attention": (None, "attention to a text, by layer and head"),
}


def add_plot_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the kinds of pictures, each with its options."""
    parsers = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    for kind, (draw, text) in KINDS.items():
        subparser = parsers.add_parser(kind, help=text, description=text)
        add = subparser.add_argument
        subparser.set_defaults(head=None)  # `decay` has no --head: it is the same for all heads
        stacks = ["encoder", "decoder"]
        if draw is None:
            add("--checkpoint", type=Path, required=True, metavar="FILE", help=_MODELS_OR_FOLDER)
            add("--text", required=True, help="text that the model reads")
            add("--target", metavar="TEXT", help="the translation (default: the model's own)")
            stacks.append("cross")
        else:
            source = subparser.add_mutually_exclusive_group(required=True)
            source.add_argument("--checkpoint", type=Path, metavar="FILE", help=_MODELS)
            source.add_argument("--encoding", metavar="SPEC", help="draw an untrained SPEC instead")
            width, heads = partial(positive_int, most=2**14), partial(positive_int, most=2**10)
            add("--embed-dim", type=width, metavar="N", help="width of SPEC's model (default: 256)")
            add("--heads", type=heads, metavar="N", help="its number of heads (default: 4)")
            add("--decoder", action="store_true", help="draw SPEC in a causal stack")
        add("--out", type=Path, required=True, metavar="FILE", help="the picture, .png or .svg")
        add_data(subparser, "folder with its dictionaries (default: the one it was trained on)")
        add("--stack", choices=stacks, help="default: the model's first")
        for option in ["--layer"] if kind == "decay" else ["--layer", "--head"]:
            add(option, type=int, nargs="+", metavar="N", help="counted from 1 (default: all)")


def run_plot(args: argparse.Namespace) -> None:
    """Draw the picture."""
    if args.out.suffix not in (".png", ".svg"):
        raise UserError(f"--out {args.out}: name a file that ends in .png or .svg")
    refuse_bad_place(args.out, "--out")
    draw, _ = KINDS[args.kind]
    pictures.save(draw(_find_subject(args)) if draw else _draw_attention(args), args.out)
    say(f"wrote {args.out}")


def _find_subject(args: argparse.Namespace) -> Subject:
    """Find the layers and heads to show: of the checkpoint, or of an untrained spec."""
    source = f"--checkpoint {args.checkpoint}" if args.checkpoint else "--encoding"  # in messages
    if args.checkpoint:
        from fairseq_posenc.workbench.loading.open_model import open_model

        if args.embed_dim or args.heads or args.decoder:
            raise UserError("--embed-dim, --heads and --decoder are for --encoding alone")
        subjects = collect_subjects(open_model(args.checkpoint, args.data).model)
        if not subjects:  # its stacks are not ours
            raise UserError(f"{source}: has none of our encodings; use plot attention")
    else:
        if args.data:
            raise UserError("--data is for --checkpoint, not for --encoding")
        sizes = args.embed_dim or 256, args.heads or 4, 128  # width, heads, positions to draw
        untrained = build_subject(args.encoding, *sizes, causal=args.decoder)
        subjects = {untrained.stack: untrained}
    stack = _choose_stack(source, list(subjects), args.stack)
    subject = replace(subjects[stack], checkpoint=args.checkpoint)  # its title names the file
    layers = _choose_numbers(args.layer, len(subject.by_layer), "layer", subject.title)
    heads = _choose_numbers(args.head, subject.dims.num_heads, "head", subject.title)
    return replace(subject, shown_layers=layers, shown_heads=heads)


def _draw_attention(args: argparse.Namespace) -> Any:
    """Draw the attention of a model to the text."""
    captured = read_attention(args.checkpoint, args.data, args.text, args.target)
    by_kind = captured.group_by_kind()  # encoder, decoder or cross -> its layers
    kind = _choose_stack(f"--checkpoint {args.checkpoint}", list(by_kind), args.stack)
    name = str(args.checkpoint)
    numbers = _choose_numbers(args.layer, len(by_kind[kind]), "layer", name)
    attentions = [by_kind[kind][number] for number in numbers]
    heads = _choose_numbers(args.head, attentions[0].weights.size(1), "head", name)  # [1, H, T, S]
    queries, keys = (captured.labels[stack] for stack in STACKS[kind])  # texts of the tokens
    return drawings.draw_attention(attentions, heads, queries, keys, f"{kind} attention in {name}")


def _choose_stack(source: str, stacks: Sequence[str], name: str | None) -> str:
    """Choose a stack, or kind of attention, by the name in ``--stack``; by default the first."""
    if name and name not in stacks:
        raise UserError(f"--stack {name}: {source} has {' and '.join(stacks)} only")
    return name or stacks[0]


def _choose_numbers(numbers: Sequence[int] | None, count: int, part: str, name: str) -> list[int]:
    """Convert numbers of ``--layer`` or ``--head``, from 1, to indices, from 0; None means all."""
    for number in numbers or ():
        if not 1 <= number <= count:
            raise UserError(f"--{part} {number}: {name} has {part}s 1 to {count}")
    return [number - 1 for number in numbers] if numbers else list(range(count))


def add_inspect_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = parser.add_argument
    text = f"{_MODELS_OR_FOLDER}; give it twice for two models side by side"
    add("--checkpoint", type=Path, action="append", required=True, metavar="MODEL", help=text)
    add("--text", required=True, help="text to read; the source of a translation")
    add("--target", metavar="TEXT", help="the translation (default: the model's own)")
    add_data(parser, "folder with dictionaries and tokenizer (default: the one it was trained on)")
    add("--out", type=Path, default="attention.html", metavar="FILE", help="default: %(default)s")


def run_inspect(args: argparse.Namespace) -> None:
    """Write the page."""
    if len(args.checkpoint) > 2:
        raise UserError(f"--checkpoint: {len(args.checkpoint)} were named; name one or two")
    refuse_bad_place(args.out, "--out")
    models = [read_attention(path, args.data, args.text, args.target) for path in args.checkpoint]
    write_whole(args.out, render_page(models, own_command()))
    say(f"wrote {args.out}, {args.out.stat().st_size / 1e6:.2f} MB")


def read_attention(path: Path, data: Path | None, text: str, target: str | None) -> TextAttention:
    """Read a text with a checkpoint of fairseq, or a folder of transformers.

    ``data`` is the folder with the dictionaries (None: the one that the model was trained on), and
    ``target`` is the translation (None: the model's own).

    Raises:
        UserError: the model cannot be read, or a text does not fit it.
    """
    if (path / "config.json").is_file():
        from fairseq_posenc.workbench.plots.read_folder import read_with_folder

        if data:
            raise UserError(f"{path} is a folder of transformers, which takes no --data")
        return read_with_folder(path, text, target)
    from fairseq_posenc.workbench.loading.open_model import open_model
    from fairseq_posenc.workbench.plots.read_checkpoint import read_with_checkpoint

    opened = open_model(path, data)
    try:
        return read_with_checkpoint(opened, text, target)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
