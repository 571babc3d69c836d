"""``fairseq-posenc report``."""

from __future__ import annotations

import argparse
import json

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.reports.report.markdown import as_data, as_text
from fairseq_posenc.workbench.reports.report.search import Found, find
from fairseq_posenc.workbench.reports.report.tables import collect
from fairseq_posenc.workbench.running.options import add_json
from fairseq_posenc.workbench.training.recipes.reported import TABLES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``fairseq-posenc report``."""
    parser.add_argument(
        "runs",
        nargs="*",
        metavar="[RECIPE=]PATH",
        help="results of any command, --save-dir of trainings, or folders that hold such; "
        "RECIPE, as in a_base=PATH, says which of the papers' set-ups they stand for",
    )
    parser.add_argument(
        "--tables",
        metavar="LIST",
        help=f"of {', '.join(TABLES)}, or all (default: those with a figure of ours)",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the report.

    Raises:
        UserError: see :mod:`~fairseq_posenc.workbench.reports.report.search` and ``tables``.
    """
    if not args.runs and args.tables is None:
        raise UserError("name runs, or the papers' tables to show with --tables")
    found = Found({}, {})
    for argument in args.runs:
        found.add(find(argument))
    if args.runs and not (found.runs or found.records):
        raise UserError("all files were passed over: there is nothing to report")
    tables, others = collect(list(found.runs.values()), args.tables)
    if args.json:
        print(json.dumps(as_data(tables, others, found.records), indent=2))
    else:
        print(as_text(tables, others, found.records))
    return 0
