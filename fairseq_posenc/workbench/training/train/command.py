"""The commands ``train-recipe`` and ``ablation``, which train models by the papers' recipes."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fairseq_posenc.checkpoints.recovery import BEST
from fairseq_posenc.checkpoints.safe_loading import open_checkpoint
from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.running.executor import refuse_jobs
from fairseq_posenc.workbench.running.exit_codes import signals_as_keyboard_interrupt
from fairseq_posenc.workbench.running.jobs import ALONE, Job, RunContext
from fairseq_posenc.workbench.running.logs import TRAIN_LOG, bits_to_nats
from fairseq_posenc.workbench.running.options import (
    add_cluster,
    add_computing,
    add_count,
    add_out,
    add_seeds,
    parse_cluster,
)
from fairseq_posenc.workbench.running.programs import run_logged, run_watched
from fairseq_posenc.workbench.training import recipes
from fairseq_posenc.workbench.training.train.runs import RecipeTraining, TrainingRun

_END_OF_HELP = """
Run the same command again to resume from the last checkpoint. Several GPUs run under torchrun; on
several nodes, start the command on each of them.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``train-recipe``."""
    trainings = recipes.list_trainings()
    _list_names(parser, trainings)
    add = parser.add_argument
    add("recipe", choices=trainings, metavar="RECIPE", help="a recipe of the list below")
    add("encoding", metavar="ENCODING", help="position encoding, as in rope or learned+m4m")
    _add_common(parser)
    folder = "checkpoints/RECIPE/DATA/, then the encoding and the changed options"
    add_out(parser, computed_default=folder)
    text = "start checkpoint, made by fairseq-posenc swap"
    add("--init", type=Path, metavar="FILE", help=text)
    text = "model of the recipes b_small and b_large (default: bert)"
    add("--model", choices=recipes.load()["models"], help=text)
    add_seeds(parser, "the recipe's, if it has several")


def add_ablation_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``ablation``."""
    ablations = recipes.load()["ablations"]
    _list_names(parser, ablations)
    text = "an ablation of the list below"
    parser.add_argument("name", choices=ablations, metavar="NAME", help=text)
    _add_common(parser)
    parser.set_defaults(out=None, init=None, seeds=None)  # `RecipeTraining` reads them


def _list_names(parser: argparse.ArgumentParser, entries: dict[str, Any]) -> None:
    """End the help with the names and titles of entries of ``recipes.json``."""
    width = max(map(len, entries))
    lines = [f"  {name:{width}}  {entry['title']}" for name, entry in entries.items()]
    parser.epilog = "\n".join(lines) + "\n" + _END_OF_HELP


def _add_common(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("data", metavar="DATA", help="a data-bin, several joined by colons, or a folder of shards")
    add_count(parser, "--gpus", "GPUs of this machine (default: all that are visible)")
    add_count(parser, "--nodes", "number of machines (default: all of the Slurm step)")
    text = "address of the first machine (default: the first of the Slurm step)"
    add("--head", metavar="HOST:PORT", help=text)
    text = "sequences per GPU (translation: tokens); the global batch stays the same"
    add_count(parser, "--per-gpu", text)
    add_computing(parser)
    add_cluster(parser, one_by_one=True)
    add("--dry-run", action="store_true", help="print the command and stop")


def run(args: argparse.Namespace) -> int:
    """Train, or continue; return the exit code."""
    recipe = recipes.build_recipe(args.recipe)
    if args.model and not recipe.has_models:
        raise UserError(f"--model: the recipe {recipe.name} has a single model; leave it out")
    model = args.model or ("bert" if recipe.has_models else "")
    runs = RecipeTraining(recipe, args.encoding, args, model).runs
    _run_all(runs, args)
    if not args.dry_run and len(runs) > 1:
        _print_best(runs[0].folder.parent)
    return 0


def _print_best(folder: Path) -> None:
    """Print the runs of a folder by the validation loss of their best checkpoint, lowest first.

    Raises:
        UserError: the folders have no checkpoint, or one is damaged.
    """
    losses = {}
    for path in sorted(folder.glob(f"*/{BEST}")):
        with open_checkpoint(path) as state:
            losses[path] = float(state["extra_state"]["val_loss"])
    if not losses:
        raise UserError(f"{folder}: its folders have no {BEST}; train first")
    for number, path in enumerate(sorted(losses, key=losses.__getitem__)):
        mark = "    " if number else "best"
        bits = losses[path]
        print(f"{mark}  validation loss {bits:.4f} bits, {bits_to_nats(bits):.4f} nats  {path}")


def run_ablation(args: argparse.Namespace) -> int:
    """Train all models of an ablation; return the exit code."""
    ablation = recipes.load()["ablations"][args.name]
    recipe = recipes.build_recipe(ablation["recipe"])
    trainings: list[TrainingRun] = []
    for row in ablation["runs"]:
        directions = row.get("attention_directions", "both")
        model = recipes.find_model(directions) if recipe.has_models else ""
        trainings += RecipeTraining(recipe, row["position_encoding"], args, model).runs
    _run_all(trainings, args)
    return 0


def _run_all(trainings: list[TrainingRun], args: argparse.Namespace) -> None:
    """Run the unfinished trainings: as jobs of a cluster, or on this machine until one fails.

    Raises:
        SystemExit: a training on this machine failed, with its exit code.
    """
    cluster = parse_cluster(args)
    if args.dry_run:
        for training in trainings:
            print(shlex.join(training.command()))
        return
    if cluster and (args.nodes or args.head):
        raise UserError(
            "--on slurm submits one single-node job per training; for several nodes, use "
            "train_scripts/slurm.sh"
        )
    for training in trainings:
        training.choose_start()  # so that errors come before the first training
    out = Path(os.path.commonpath([training.folder for training in trainings]))
    with signals_as_keyboard_interrupt():
        if cluster:
            cluster.run([_build_job(training) for training in trainings], out)
            return
        refuse_jobs(out)  # those that a cluster still runs in the folder
        for training in trainings:
            if training.step().outputs is not None:
                print(f"{training.folder}: the training is finished, and nothing was changed")
                continue
            log = training.folder / TRAIN_LOG
            training.step(partial(train_here, training.command(), log)).do()


def _build_job(training: TrainingRun) -> Job:
    """Build the job of a training, for a cluster, where its output only goes to the log."""

    def work(context: RunContext) -> None:
        run_logged(training.command(), training.folder / TRAIN_LOG, context.lock)

    return Job(str(training.folder), training.folder, (training.step(work),))


def train_here(command: Sequence[str], log: Path, context: RunContext = ALONE) -> None:
    """Run a command, and write its output to a log as well.

    Raises:
        SystemExit: the command failed, with its exit code as shells return it.
    """
    # With fairseq's own --log-file, each epoch would repeat every line once more.
    with open(log, "a", encoding="utf-8", buffering=1) as file:  # a line at a time

        def write(line: str) -> None:
            file.write(line)
            print(line, end="", flush=True)

        status = run_watched(command, write)
    if status:
        raise SystemExit(128 - status if status < 0 else status)
