"""``fairseq-posenc probe``: synthetic tasks, tested beyond the length of the training."""

from __future__ import annotations

import argparse

from fairseq_posenc import registry
from fairseq_posenc.workbench.experiments.probe import picture, report, tasks
from fairseq_posenc.workbench.experiments.probe.experiment import TaskExperiment
from fairseq_posenc.workbench.experiments.variants import CAUSAL, FAMILIES, parse_variants
from fairseq_posenc.workbench.results.pictures import can_draw
from fairseq_posenc.workbench.running import options
from fairseq_posenc.workbench.running.exit_codes import signals_as_keyboard_interrupt
from fairseq_posenc.workbench.running.folders import lock_output_folder
from fairseq_posenc.workbench.running.progress import say

_ALL = "all"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = parser.add_argument
    options.add_out(parser, "probe")
    add("--tasks", default=_ALL, help=f"some of {', '.join(sorted(tasks.TASKS))} (default: all)")
    add(
        "--encodings",
        default="none,learned,sinusoidal,t5,alibi,rope",
        help="position-encoding specs, separated by commas, or all (default: %(default)s)",
    )
    add("--family", choices=FAMILIES, default=CAUSAL, help="kind of models (default: %(default)s)")
    options.add_seeds(parser, default=(1, 2, 3))
    options.add_count(parser, "--updates", "training updates of each model", default=1000)
    options.add_count(parser, "--trained", "words of the longest training question", default=40)
    options.add_lengths(parser, "words of the test questions", "10,20,40,60,80,120,160,200")
    options.add_jobs(parser, "one per core, or one on the GPU")
    options.add_cluster(parser)
    options.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Run the probe and write the report; return the exit code.

    Raises:
        UserError: wrong input, or a fairseq command that failed.
    """
    experiment = _build_experiment(args)
    with (
        signals_as_keyboard_interrupt(),
        lock_output_folder(experiment.out, allowed=report.FILES) as lock,
    ):
        results = experiment.run(lock)
        record = report.build_record(results)
        record.write(experiment.out / report.RECORD)
        drawn = picture.draw_all(results) if can_draw() else {}
        path = report.write_report(results, drawn)
    print(record.text() if args.json else report.format_tables(results))
    say(f"report: {path}" + ("" if drawn else " (no picture: matplotlib is not installed)"))
    return 0


def _build_experiment(args: argparse.Namespace) -> TaskExperiment:
    names = sorted(tasks.TASKS) if args.tasks == _ALL else args.tasks.split(",")
    distinct = dict.fromkeys(name.strip() for name in names)  # in the user's order
    encodings = args.encodings
    if encodings == _ALL:
        encodings = ",".join(registry.names(encoder=args.family != CAUSAL))
    # All other settings are options with the names of the experiment's fields.
    return TaskExperiment.from_args(
        args, tasks=tuple(map(tasks.get, distinct)), variants=parse_variants(encodings)
    )
