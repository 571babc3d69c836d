"""``fairseq-posenc inspect``: writes the attention of one or two models as one HTML file."""

from __future__ import annotations

import argparse
from pathlib import Path

from fairseq_posenc.errors import UserError
from fairseq_posenc.files import refuse_bad_place, write_whole
from fairseq_posenc.workbench.plots.inspection import Inspection, render_page
from fairseq_posenc.workbench.results.record import own_command
from fairseq_posenc.workbench.running.files import find_model
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
        metavar="MODEL",
        help="a masked LM, causal LM or translation model (also fairseq's own), or a folder of "
        "Hugging Face transformers; give it twice for two models side by side",
    )
    add("--text", required=True, help="text to read; the source of a translation")
    add("--target", metavar="TEXT", help="the translation (default: the model's own)")
    add_data(
        parser, "directory with dictionaries and tokenizer (default: that of each model's training)"
    )
    add("--out", type=Path, default="attention.html", metavar="FILE", help="(default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Write the page; return the exit code."""
    if len(args.checkpoint) > 2:
        raise UserError(f"--checkpoint: {len(args.checkpoint)} were named; name one or two")
    refuse_bad_place(args.out, "--out")
    inspections = [_inspect(path, args) for path in args.checkpoint]
    page = render_page(inspections, own_command())
    write_whole(args.out, page)
    say(f"{args.out}: {len(page) / 1e6:.2f} MB")
    return 0


def _inspect(path: Path, args: argparse.Namespace) -> Inspection:
    """Inspect a folder of transformers or a checkpoint of fairseq; import only that library."""
    path = find_model(path)
    if path.is_dir():
        from fairseq_posenc.workbench.plots.inspect_folder import inspect_folder

        if args.data:
            raise UserError(f"{path} is a folder of transformers, which takes no --data")
        return inspect_folder(path, args.text, args.target)
    from fairseq_posenc.workbench.loading.open_model import open_model
    from fairseq_posenc.workbench.plots.model_inputs import inspect_model, prepare_input

    opened = open_model(path, args.data)
    return inspect_model(opened, prepare_input(opened, args.text, args.target))
