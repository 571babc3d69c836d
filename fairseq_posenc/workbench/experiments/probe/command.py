"""``fairseq-posenc probe``: tasks with known answers, read beyond the trained length."""

from __future__ import annotations

import argparse

from fairseq_posenc import registry
from fairseq_posenc.workbench.experiments.probe import tasks
from fairseq_posenc.workbench.experiments.probe.experiment import TaskExperiment
from fairseq_posenc.workbench.experiments.probe.picture import draw, draw_depths, draw_learning
from fairseq_posenc.workbench.experiments.probe.report import (
    LEARNING,
    PICTURE,
    RECORD,
    REPORT,
    depth_picture,
    record,
    tables,
    write_report,
)
from fairseq_posenc.workbench.experiments.probe.results import tasks_with_depths
from fairseq_posenc.workbench.experiments.probe.settings import TaskSettings
from fairseq_posenc.workbench.experiments.trainings import default_jobs
from fairseq_posenc.workbench.experiments.variants import CAUSAL, FAMILIES, parse_variants
from fairseq_posenc.workbench.results.pictures import can_draw
from fairseq_posenc.workbench.running.exit_codes import CONTINUES, signals_as_keyboard_interrupt
from fairseq_posenc.workbench.running.locks import lock_output_folder
from fairseq_posenc.workbench.running.options import (
    add_count,
    add_jobs,
    add_json,
    add_lengths,
    add_out,
    add_place,
    add_seeds,
    parse_place,
)
from fairseq_posenc.workbench.running.progress import say

_ALL = "all"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = parser.add_argument
    add_out(parser, "probe")
    add("--tasks", default=_ALL, help=f"some of {', '.join(tasks.names())} (default: all)")
    add(
        "--encodings",
        default="none,learned,sinusoidal,t5,alibi,rope",
        help="position-encoding specs, separated by commas, or all (default: %(default)s)",
    )
    add("--family", choices=FAMILIES, default=CAUSAL, help="kind of models (default: %(default)s)")
    add_seeds(parser, (1, 2, 3))
    add_count(parser, "--updates", "training updates of each model", 1000)
    add_count(parser, "--trained", "longest questions trained on", 40)
    add_lengths(parser, "lengths of the test questions", "10,20,40,60,80,120,160,200")
    add_jobs(parser, "one on each core, or on the GPU")
    add_place(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Run the probe and write the report; return the exit code.

    Raises:
        UserError: wrong input, or a fairseq command that failed.
    """
    settings = _settings(args)
    with (
        signals_as_keyboard_interrupt(CONTINUES),
        lock_output_folder(settings.out, (REPORT, PICTURE, LEARNING, RECORD)) as lock,
    ):
        results = TaskExperiment(settings, lock).run()
        found = record(results)
        found.write(settings.out / RECORD)
        if drawn := can_draw():
            draw(results, settings.out / PICTURE)
            draw_learning(results, settings.out / LEARNING)
            for task in tasks_with_depths(results):
                draw_depths(results, task, settings.out / depth_picture(task))
        report = write_report(results, drawn)
    print(found.text() if args.json else tables(results))
    say(f"report: {report}" + ("" if drawn else " (no picture: matplotlib is not installed)"))
    return 0


def _settings(args: argparse.Namespace) -> TaskSettings:
    names = tasks.names() if args.tasks == _ALL else args.tasks.split(",")
    encodings = args.encodings
    if encodings == _ALL:
        encodings = ",".join(registry.names(encoder=args.family != CAUSAL))
    return TaskSettings(
        out=args.out,
        family=args.family,
        tasks=tuple(tasks.get(name.strip()) for name in dict.fromkeys(names)),
        variants=parse_variants(encodings),
        seeds=args.seeds,
        updates=args.updates,
        trained=args.trained,
        lengths=args.lengths,
        jobs=args.jobs or default_jobs(),
        cluster=parse_place(args),
        train_args=tuple(args.passed),  # the words after `--`
    )
