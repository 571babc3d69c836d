"""The commands ``train-recipe`` and ``ablation``."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.running.executor import parse_place, run_pieces
from fairseq_posenc.workbench.running.exit_codes import CONTINUES, signals_as_keyboard_interrupt
from fairseq_posenc.workbench.running.logs import bits_to_nats
from fairseq_posenc.workbench.running.options import (
    add_computing,
    add_count,
    add_on,
    add_out,
    add_seeds,
)
from fairseq_posenc.workbench.training import recipes
from fairseq_posenc.workbench.training.train import launching
from fairseq_posenc.workbench.training.train.request import Run, Training

_MORE = """
The same command again goes on from the last checkpoint. Several GPUs run under torchrun, and
several nodes: start it on each of them.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``train-recipe``."""
    known = recipes.trainings()
    _describe(parser, {name: entry["title"] for name, entry in known.items()})
    add = parser.add_argument
    add("recipe", choices=known, metavar="RECIPE", help="one of those below")
    add("encoding", metavar="ENCODING", help="spec of the positions (fairseq-posenc list)")
    _add_common(parser)
    add_out(parser, computed="checkpoints/RECIPE/DATA/, then the encoding and what was changed")
    add(
        "--init",
        type=Path,
        metavar="FILE",
        help="start checkpoint, which fairseq-posenc swap makes",
    )
    add("--model", choices=recipes.load()["models"], help="b_small, b_large: default bert")
    add_seeds(parser, "the recipe's, if it has several")


def add_ablation_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``ablation``."""
    known = recipes.load()["ablations"]
    _describe(parser, {name: entry["title"] for name, entry in known.items()})
    parser.add_argument("name", choices=known, metavar="NAME", help="one of those below")
    _add_common(parser)
    parser.set_defaults(out=None, init=None, seeds=None)


def _describe(parser: argparse.ArgumentParser, names: dict[str, str]) -> None:
    width = max(map(len, names))
    lines = [f"  {name:{width}}  {title}" for name, title in names.items()]
    parser.epilog = "\n".join(lines) + "\n" + _MORE


def _add_common(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("data", metavar="DATA", help="a data-bin, several joined by colons, or a folder of shards")
    add_count(parser, "--gpus", "of this machine (default: all that are visible)")
    add_count(parser, "--nodes", "machines (default: those of the SLURM step)")
    add("--head", metavar="HOST:PORT", help="where they meet (default: the SLURM step's first)")
    add_count(parser, "--per-gpu", "what a GPU takes at a time; the global batch stays what it is")
    add_computing(parser)
    add_on(parser, one_by_one=True)
    add("--dry-run", action="store_true", help="print the command and stop")


def run(args: argparse.Namespace) -> int:
    """Train, or go on with it; return the exit code.

    Raises:
        UserError: wrong input.
    """
    recipe = recipes.training(args.recipe)
    if args.model and not recipe.has_models:
        raise UserError(f"{recipe.name} has no models to choose from: leave --model out")
    model = args.model or ("bert" if recipe.has_models else "")
    found, here = Training(recipe, args.encoding, args, model).runs, args.on[0] == "local"
    if len(found) == 1 and here and not args.dry_run:
        launching.become(found[0])
    _run_all(found, args)
    if len(found) > 1 and not args.dry_run:
        _tell_best(found[0].folder.parent)
    return 0


def _tell_best(folder: Path) -> None:
    """Print the runs of a folder by the validation loss of their best checkpoint, lowest first.

    Raises:
        UserError: there is no checkpoint, or one that is not whole.
    """
    from fairseq_posenc.checkpoints import safe_loading  # imports torch

    safe_loading.allow_safe_classes()
    losses = {}
    for path in sorted(folder.glob("*/checkpoint_best.pt")):
        with safe_loading.readable_errors(str(path)):
            losses[path] = float(safe_loading.open_mapped(path)["extra_state"]["val_loss"])
    if not losses:
        raise UserError(f"{folder}: no folder in it has a checkpoint_best.pt; train first")
    for number, path in enumerate(sorted(losses, key=losses.__getitem__)):
        mark, bits = "    " if number else "best", losses[path]
        print(f"{mark}  validation loss {bits:.4f} bits, {bits_to_nats(bits):.4f} nats  {path}")


def run_ablation(args: argparse.Namespace) -> int:
    """Train all models of an ablation; return the exit code.

    Raises:
        UserError: wrong input.
    """
    ablation = recipes.load()["ablations"][args.name]
    recipe = recipes.training(ablation["recipe"])
    found: list[Run] = []
    for row in ablation["runs"]:
        directions = row.get("attention_directions", "both")
        model = recipes.model_of(directions) if recipe.has_models else ""
        found += Training(recipe, row["position_encoding"], args, model).runs
    _run_all(found, args)
    return 0


def _run_all(found: list[Run], args: argparse.Namespace) -> None:
    """Train all that are not done: one after the other, or as jobs of a cluster."""
    cluster = parse_place(args)
    if args.dry_run:
        for one in found:
            print(shlex.join(one.command()))
        return
    if cluster and (args.nodes or args.head):
        raise UserError(
            "--on slurm makes a job of one node of each training; over several nodes it is one job "
            "with train_scripts/slurm.sh"
        )
    for one in found:
        one.choose_start()  # a wrong one is an error before the first is trained
    out = Path(os.path.commonpath([one.folder for one in found]))
    with signals_as_keyboard_interrupt(CONTINUES):
        run_pieces([*map(launching.as_piece, found)], out, cluster)
