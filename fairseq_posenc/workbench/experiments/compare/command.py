"""``fairseq-posenc compare``: trains models that differ only in their position encoding."""

from __future__ import annotations

import argparse
from pathlib import Path

from fairseq_posenc.workbench.experiments import text_experiment, variants
from fairseq_posenc.workbench.experiments.compare import record, report
from fairseq_posenc.workbench.experiments.compare.live import Live, announce
from fairseq_posenc.workbench.experiments.corpus import check_text
from fairseq_posenc.workbench.experiments.text_experiment import TextExperiment
from fairseq_posenc.workbench.experiments.trainings import default_jobs
from fairseq_posenc.workbench.running import options
from fairseq_posenc.workbench.running.devices import choose_device
from fairseq_posenc.workbench.running.exit_codes import signals_as_keyboard_interrupt
from fairseq_posenc.workbench.running.folders import lock_output_folder
from fairseq_posenc.workbench.running.progress import say

# On a CPU so many models are trained at a time, even on fewer cores, to compare their live curves.
_LEAST_JOBS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = parser.add_argument
    options.add_out(parser, computed_default="demo; compare-NAME for --text NAME.txt")
    add("--text", type=Path, help="UTF-8 text file (default: Python's own documentation)")
    family_help = "kind of models (default: %(default)s)"
    add("--family", choices=list(text_experiment.TASKS), default=variants.MASKED, help=family_help)
    add(
        "--encodings",
        default=variants.DEFAULT_ENCODINGS,
        help="models to compare, separated by commas (or by semicolons if a spec has commas): "
        "position-encoding specs such as 'learned+m4m(max_distance=64)', or "
        f"{', '.join(variants.SHORTHANDS)} (default: %(default)s)",
    )
    options.add_count(parser, "--updates", "training updates of each model", 250)
    options.add_count(parser, "--vocab-size", "number of sentencepieces", 512)
    options.add_seeds(parser, (1, 2, 3))
    rates = "learning rates, as in 0.001,0.003: a model is trained with all and judged at its best"
    add("--lrs", default=text_experiment.LEARNING_RATE, help=f"{rates} (default: %(default)s)")
    options.add_jobs(parser, "one per core, but at least five models of a seed; one on a GPU")
    options.add_cluster(parser)
    add("--open", action="store_true", help="show the report in a browser while trainings go on")
    add("--overwrite", action="store_true", help="replace a report on more seeds or encodings")
    options.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Run the comparison and write the report; return the exit code.

    Raises:
        UserError: wrong input.
        RunError: a command of fairseq failed.
    """
    experiment = _build_experiment(args)
    if experiment.text:
        check_text(experiment.text)  # an unusable text is refused before anything is written
    if not args.overwrite:
        record.refuse_to_lose_report(experiment)
    with (
        signals_as_keyboard_interrupt(),
        lock_output_folder(experiment.out, (*report.FILES, record.RECORD)) as lock,
    ):
        models = f"{', '.join(experiment.names)} (--family {experiment.family})"
        say(f"comparing {models}; results: {experiment.out}/")
        if not experiment.cluster:
            announce(experiment)
        results = experiment.run(lock, Live(opens_browser=args.open))
        path = report.write_report(results)
        comparison = record.build_record(results)
        comparison.write(experiment.out / record.RECORD)
    print(comparison.text() if args.json else report.format_screen(results))
    say(f"report: {path}, and as a page {path.with_name(report.PAGE)}")
    return 0


def _build_experiment(args: argparse.Namespace) -> TextExperiment:
    models = variants.parse_variants(args.encodings)
    jobs = args.jobs or default_jobs()
    if not args.jobs and choose_device() != "cuda":
        jobs = max(jobs, min(len(models), _LEAST_JOBS))
    return TextExperiment.from_args(
        args,
        out=args.out or Path(f"compare-{args.text.stem}" if args.text else "demo"),
        variants=models,
        lrs=tuple(dict.fromkeys(lr.strip() for lr in args.lrs.split(","))),
        jobs=jobs,
    )
