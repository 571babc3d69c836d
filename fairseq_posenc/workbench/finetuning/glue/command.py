"""``fairseq-posenc glue``: fine-tunes a pre-trained model on the tasks of GLUE.

A protocol is a paper's set-up for GLUE (hyper-parameters, seeds and metrics); ``STATISTICS`` lists
their names. Each task, learning rate and seed is a run; a second call with the same ``--out`` does
only the unfinished runs.
"""

import argparse
import shlex
from functools import partial
from pathlib import Path

from fairseq_posenc import folders
from fairseq_posenc.errors import counted
from fairseq_posenc.tasks.glue.definitions import parse_tasks
from fairseq_posenc.workbench.finetuning.glue import report, runs
from fairseq_posenc.workbench.finetuning.glue.worker import fine_tune
from fairseq_posenc.workbench.finetuning.glue_figures import STATISTICS
from fairseq_posenc.workbench.finetuning.recipes import add_set, format_override
from fairseq_posenc.workbench.loading.pretrained import read_pretrained
from fairseq_posenc.workbench.running import devices, options, programs
from fairseq_posenc.workbench.running.progress import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = parser.add_argument
    add("--checkpoint", type=Path, required=True, help="pre-trained masked LM")
    add("--protocol", choices=STATISTICS, required=True, help="paper whose protocol is followed")
    options.add_data(parser, "folder made by fairseq-posenc preprocess glue", required=True)
    add("--tasks", default="all", help="tasks, separated by commas (default: all eight)")
    text = "peak learning rates, as in 1e-5,2e-5 (default: the paper's)"
    add("--learning-rates", type=options.positive_numbers, metavar="LR,LR", default=(), help=text)
    options.add_seeds(parser, computed="the paper's; one with --protocol m4m")
    options.add_out(parser, computed="glue-MODEL-PROTOCOL")
    options.add_count(parser, "--jobs", "runs at a time (default: one per GPU)")
    options.add_on(parser, example="partition=gpu gpus=1 time=2:00:00")
    add("--dry-run", action="store_true", help="print the commands and stop")
    add_set(parser, example="model.dropout=0.2")


def run(args: argparse.Namespace) -> None:
    """Train and evaluate all unfinished runs, and write the report.

    Raises:
        UserError: wrong input.
        RunError: runs failed.
    """
    slurm = options.parse_slurm(args.on)
    pretrained = read_pretrained(args.checkpoint)
    # Absolute, because the runs' requests name it, and hydra changes the working folder.
    pretrained = pretrained._replace(path=pretrained.path.resolve())
    out = (args.out or Path(f"glue-{report.name_model(pretrained.path)}-{args.protocol}")).resolve()
    user_dir = format_override("common.user_dir", args.user_dir.resolve())  # `cli` adds --user-dir
    request = runs.GlueRequest(
        protocol=args.protocol,
        tasks=parse_tasks(args.tasks),
        data=args.data,  # may be relative: opening a task's data-bin in it makes the path absolute
        pretrained=pretrained,
        out=out,
        rates=args.learning_rates,
        seeds=args.seeds or (),
        overrides=[user_dir, *args.changes],  # the values of --set come last, so they win
    )
    planned = runs.plan_runs(request)
    if args.dry_run:
        for glue_run in planned:
            print(f"# {glue_run.label}: {counted(glue_run.max_update, 'updates')}")
            print(shlex.join(glue_run.command))
        return
    with folders.lock_folder(out):
        facts = {"protocol": args.protocol, "checkpoint": str(pretrained.path)}
        facts["version of the checkpoint"] = pretrained.path.stat().st_mtime_ns
        folders.claim(out, facts)  # refuses a folder whose results were made with other values
        for glue_run in planned:
            runs.claim(glue_run, out)  # the same for each run: its settings, in its own folder
        listed = runs.list_runs(out)  # these, and those of earlier commands
        pending = {x.label: partial(fine_tune, x, out) for x in planned if not x.is_finished(out)}
        say(f"{counted(len(planned), 'runs')}, not finished yet: {len(pending)}; results: {out}")
        try:  # a run that fails does not stop the others
            if slurm is None:
                programs.run_here(pending, args.jobs or len(devices.list_gpus()) or 1)
            elif pending:  # an array of jobs needs at least one
                from fairseq_posenc.workbench.running.slurm import run_on_slurm  # needs submitit

                run_on_slurm(pending, out / "slurm", slurm, args.jobs)
        finally:  # the report covers the runs that succeeded, and lists the others
            record = report.write_results(listed, out, pretrained, args.protocol)
    print(report.format_report(record))
    say(f"wrote {out}/results.md, {out}/results.json and {out}/submission/")
    if missing := report.complete_submission(out / "submission", args.data):  # adds WNLI's file
        say(f"still missing from the submission to GLUE's site: {', '.join(missing)}")
