"""``fairseq-posenc report``: shows results, and compares them with the papers' tables.

Results are records (JSON files of any command) and trainings (checkpoints, or folders with one).
Each pre-training, each training of a translation model, and each record of GLUE, SQuAD or BLEU is a
run. A run stands in the row of the paper's table that has its recipe and its encoding.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Optional

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.reports import checkpoint_facts
from fairseq_posenc.workbench.reports.paper_tables import build_report
from fairseq_posenc.workbench.reports.report_text import format_report
from fairseq_posenc.workbench.reports.user_runs import UserRun, build_run, read_runs
from fairseq_posenc.workbench.results.record import Record, RecordError
from fairseq_posenc.workbench.results.record import read as read_record
from fairseq_posenc.workbench.running.options import add_json
from fairseq_posenc.workbench.running.progress import say
from fairseq_posenc.workbench.training import recipes

Runs = dict[tuple[Path, str], UserRun]  # by file and name, so that a run named twice counts once
Records = dict[Path, Record]  # by file
_STATE_FILES = ("stamp.json", "result.json")  # files from which commands continue, not results


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``fairseq-posenc report``."""
    parser.add_argument(
        "results",
        nargs="*",
        metavar="[RECIPE=]PATH",
        help="results of any command, a --save-dir, or a folder with such files; "
        "RECIPE, as in a_base=PATH, is the paper's recipe to compare them with",
    )
    names = ", ".join(recipes.load_tables())
    text = f"tables to show: {names}, or all (default: those with your results)"
    parser.add_argument("--tables", metavar="LIST", help=text)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the report.

    Raises:
        UserError: there are no results, an unknown table, or a checkpoint that cannot be read.
    """
    if not args.results and args.tables is None:
        raise UserError("name results, or the papers' tables to show with --tables")
    runs: Runs = {}
    records: Records = {}
    for argument in args.results:
        runs_of_argument, records_of_argument = find_results(argument)
        runs |= runs_of_argument
        records |= records_of_argument
    if args.results and not (runs or records):
        raise UserError("all files were skipped: nothing to report")
    report = build_report(list(runs.values()), records, args.tables)
    print(json.dumps(report, indent=2) if args.json else format_report(report))
    return 0


def find_results(argument: str) -> tuple[Runs, Records]:
    """Find the results of an argument, ``PATH`` or ``RECIPE=PATH``.

    Files that are not records, or records of another version, are listed on standard error.

    Raises:
        UserError: there are no results at all, or a checkpoint cannot be read.
    """
    path, recipe = _split_recipe(argument)
    if not path.exists():
        raise UserError(f"{path}: no such file or folder")
    runs: Runs = {}
    records: Records = {}
    skipped = defaultdict(list)
    for source in _list_sources(path):
        try:
            source_runs, record = _read_source(source, recipe)
        except RecordError as error:
            skipped[str(error)].append(source)
            continue
        runs |= {(run.path.resolve(), run.name): run for run in source_runs}
        if record is not None:
            records[source.resolve()] = record
    for reason, files in skipped.items():
        others = f" and {len(files) - 1:,} more" if len(files) > 1 else ""
        say(f"skipped: {files[0]}{others}: {reason}")
    if not (runs or records or skipped):
        raise UserError(
            f"{path}: holds no results of a fairseq-posenc command, and no checkpoint of a "
            "pre-training or translation model (checkpoint_last.pt)"
        )
    return runs, records


def _split_recipe(argument: str) -> tuple[Path, Optional[str]]:
    """Split ``PATH`` or ``RECIPE=PATH`` into the path and the recipe, None without one."""
    name, equals, rest = argument.partition("=")
    if equals and name in recipes.load()["pretraining"]:
        return Path(rest), name
    return Path(argument), None


def _list_sources(path: Path) -> Iterator[Path]:
    """Yield a file, which may be a checkpoint, or all folders and JSON files below a folder."""
    if path.is_file():
        yield path
        return
    for folder in [path, *sorted(inner for inner in path.rglob("*") if inner.is_dir())]:
        yield folder
        for file in sorted(folder.glob("*.json")):
            if file.name not in _STATE_FILES:
                yield file


def _read_source(path: Path, recipe: Optional[str]) -> tuple[list[UserRun], Optional[Record]]:
    """Read a folder or file: the runs for the papers' tables, and the record if it is one."""
    if path.is_dir() or path.suffix == ".pt":
        if path.is_dir():
            training = checkpoint_facts.read_folder(path)
        else:
            training = checkpoint_facts.read_checkpoint(path)
        tasks_of_tables = (*checkpoint_facts.PRETRAINING_TASKS, "translation")
        if training is None or training.task not in tasks_of_tables:
            return [], None
        return [build_run(path, training, recipe)], None
    record = read_record(path)
    try:
        return read_runs(path, record, recipe), record
    except (LookupError, TypeError, ValueError) as error:
        raise RecordError(f"not a complete record of {record.kind} ({error!r})") from error
