"""``fairseq-posenc plan``: estimates speed, memory and duration of a training by a short probe."""

from __future__ import annotations

import argparse
import os
import shlex
import tempfile
import time
from pathlib import Path
from typing import Any, Optional

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.results.record import Record, own_command
from fairseq_posenc.workbench.running.exit_codes import signals_as_keyboard_interrupt
from fairseq_posenc.workbench.running.folders import lock_folder
from fairseq_posenc.workbench.running.options import add_count, add_json
from fairseq_posenc.workbench.running.programs import run_logged
from fairseq_posenc.workbench.running.progress import bar
from fairseq_posenc.workbench.training import recipes
from fairseq_posenc.workbench.training.plan.probe import (
    PlannedTraining,
    ProbeLog,
    measure_largest_process,
    read_training,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = parser.add_argument
    add_count(parser, "--updates", "length of the probe in updates", 50)
    add_json(parser)
    add("--log", type=Path, metavar="FILE", help="keep the log of the probe in this file")
    text = "a training script and its arguments, or a fairseq-train command after --"
    add("training", nargs=argparse.REMAINDER, help=text)


def run(args: argparse.Namespace) -> int:
    """Run the probe and print its figures; return the exit code.

    Raises:
        UserError: wrong input.
        RunError: the training failed.
    """
    # In `plan SCRIPT ... -- ...` the dashes are the script's; in `plan -- COMMAND` they are ours.
    dashes = ["--"] if args.training and args.after_dashes else []
    words = [*args.training, *dashes, *args.after_dashes]
    if not words:
        raise UserError(
            "name a training, for example: fairseq-posenc plan train_scripts/b_small.sh learned "
            "data-bin/wiki, or fairseq-posenc plan -- fairseq-train data-bin/wiki ..."
        )
    if args.updates < 10:
        raise UserError(f"--updates {args.updates}: a probe needs at least 10")
    training = read_training(words)
    _refuse_without_gpu(training.command)
    with signals_as_keyboard_interrupt("the probe was deleted, except its log"):
        plan = run_probe(training, args.updates, args.log)
    if args.json:
        spec = training.position_encoding
        data = {"training": shlex.join(training.command)}
        record = Record("plan", {"plan": [plan]}, data, spec, training.seed, own_command())
        print(record.text())
    else:
        print(format_plan(plan))
    return 0


def _refuse_without_gpu(command: list[str]) -> None:
    """Refuse fp16 without a GPU, for which fairseq would end in a traceback."""
    import torch  # slow to import, and not needed to read the options

    if "--fp16" in command and "--cpu" not in command and not torch.cuda.is_available():
        raise UserError(
            "the training is in fp16, and no GPU is visible: add --device cpu to a script's "
            "arguments, or leave --fp16 out of a command"
        )


def run_probe(
    training: PlannedTraining, updates: int, log: Optional[Path] = None
) -> dict[str, Any]:
    """Run a probe of a training; return its figures, and the duration of the whole training.

    Args:
        training: the training.
        updates: length of the probe; the first fifth, at most 10, does not count.
        log: the log; None for a temporary file, which is kept if the probe fails.

    Raises:
        RunError: the training failed.
        UserError: its log shows too few updates.
    """
    left_out = min(10, updates // 5)  # slower: caches are empty, and memory is allocated
    log_file = log or _make_temporary_log()
    probe_log = ProbeLog()
    # On the disk of the later checkpoints, whose space and speed matter.
    save_dir = training.save_dir.absolute()
    parent = next(folder for folder in (save_dir, *save_dir.parents) if folder.is_dir())
    with tempfile.TemporaryDirectory(prefix="plan-", dir=parent) as folder:
        command = training.build_probe(updates, Path(folder))
        with lock_folder(Path(folder)) as lock, bar("probe", updates, " updates") as progress:

            def read_line(line: str) -> None:
                if probe_log.read(line, time.monotonic()):
                    progress.update(1)

            run_logged(command, log_file, lock, read_line)
        size = sum(path.stat().st_size for path in Path(folder).glob("*.pt"))  # one for each shard
    figures = probe_log.measure(left_out)
    if log is None:
        log_file.unlink()
    return {
        "probe_updates": updates,
        "left_out": left_out,
        **figures,
        "process_memory": measure_largest_process(),
        "checkpoint_bytes": size,
        **_compute_duration(training, figures),
    }


def _make_temporary_log() -> Path:
    handle, name = tempfile.mkstemp(prefix="fairseq-posenc-plan-", suffix=".log")
    os.close(handle)
    return Path(name)


def _compute_duration(training: PlannedTraining, figures: dict[str, Any]) -> dict[str, Any]:
    """Compute the last update and the duration of the training, and look up the paper's."""
    limits = [training.max_update] if training.max_update else []
    if training.max_epoch:
        limits.append(training.max_epoch * figures["updates_per_epoch"])
    last_update = min(limits, default=None)
    hours = last_update * figures["seconds_per_update"] / 3600 if last_update else None
    hardware = recipes.build_recipe(training.recipe).hardware if training.recipe else {}
    paper = {f"paper_{name}": hardware.get(name) for name in ("hours", "gpus", "kind")}
    return {"end": last_update, "hours": hours, **paper}


def format_plan(plan: dict[str, Any]) -> str:
    """Format the figures of :func:`run_probe`, a line for each."""
    device = f"{plan['devices']} x {plan['gpu']}" if plan["gpu"] else "the processor"
    memory = f"{plan['process_memory']:.1f} GiB in the largest process"
    if plan["gpu_memory"] is not None:
        memory = f"{plan['gpu_memory']:.1f} of {plan['gpu_total']:.1f} GiB on a GPU; {memory}"
    seconds = plan["checkpoint_seconds"]
    duration = f", written in {seconds:.1f} s" if seconds is not None else ""
    rows = {
        "probe": f"{plan['probe_updates']} updates on {device}; medians without the first "
        f"{plan['left_out']}",
        "tokens per second": f"{plan['tokens_per_second']:,.0f}",
        "updates per second": _three_digits(1 / plan["seconds_per_update"]),
        "an update": f"{plan['tokens_per_update']:,.0f} tokens, "
        f"{plan['sequences_per_update']:,.0f} sequences",
        "peak memory": memory,
        "checkpoint": f"{plan['checkpoint_bytes'] / 1e6:,.1f} MB{duration}",
        "time": _format_time(plan),
    }
    if plan["paper_hours"]:
        paper = f"{plan['paper_hours']:g} hours on {plan['paper_gpus']} x {plan['paper_kind']}"
        rows["the paper"] = paper
    width = max(map(len, rows))
    return "\n".join(f"{name:{width}}  {value}" for name, value in rows.items())


def _format_time(plan: dict[str, Any]) -> str:
    if plan["end"] is None:
        return "unknown: the command has neither --max-update nor --max-epoch"
    hours = plan["hours"]
    epochs = plan["end"] / plan["updates_per_epoch"]
    return (
        f"{_three_digits(hours)} hours ({_three_digits(hours / 24)} days) for {plan['end']:,} "
        f"updates, or {_three_digits(epochs)} epochs, plus validation and checkpoints"
    )


def _three_digits(value: float) -> str:
    """Format a number with at least three significant digits, without an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
