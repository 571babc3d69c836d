"""``fairseq-posenc inspect``: the attention of a text in a trained model, as one HTML file."""

from __future__ import annotations

import argparse
from pathlib import Path

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.loading.open_model import open_model
from fairseq_posenc.workbench.plots.command import refuse_bad_output
from fairseq_posenc.workbench.plots.model_inputs import read_text
from fairseq_posenc.workbench.plots.page import Inspection, inspect_model, render_page
from fairseq_posenc.workbench.results.record import own_command
from fairseq_posenc.workbench.running.files import write_whole
from fairseq_posenc.workbench.running.options import add_data
from fairseq_posenc.workbench.running.progress import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = parser.add_argument
    add(
        "--checkpoint",
        type=Path,
        action="append",
        required=True,
        metavar="FILE",
        help="a masked LM, causal LM or translation model, ours or fairseq's own; twice for two "
        "models side by side",
    )
    add("--text", required=True, help="text to read; the source of a translation")
    add("--target", metavar="TEXT", help="the translation (default: the model's own)")
    add_data(
        parser,
        "directory with dictionaries and tokenizer (default: that of each model's training)",
    )
    add(
        "--out",
        type=Path,
        default=Path("attention.html"),
        metavar="FILE",
        help="(default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Write the page; return the exit code.

    Raises:
        UserError: wrong input.
    """
    if len(args.checkpoint) > 2:
        raise UserError(f"--checkpoint is given {len(args.checkpoint)} times: name one, or two")
    refuse_bad_output(args.out)
    inspections = []
    for path in args.checkpoint:
        opened = open_model(path, args.data)
        inspections.append(inspect_model(opened, read_text(opened, args.text, args.target)))
    text = render_page(inspections, own_command())
    say(f"{args.out}: {len(text) / 1e6:.2f} MB, {' and '.join(map(_format_shape, inspections))}")
    try:
        write_whole(args.out, text)
    except OSError as error:
        raise UserError(f"--out {args.out}: {error.strerror}") from None
    return 0


def _format_shape(inspection: Inspection) -> str:
    """Format the layers, heads and tokens of a model."""
    return ", ".join(
        f"{kind['name']} {kind['layers']} layers x {kind['heads']} heads x "
        f"{len(kind['queries'])}x{len(kind['keys'])} tokens"
        for kind in inspection.facts["kinds"]
    )
