"""The commands ``list`` and ``user-dir``, which are quick: only ``list --json`` imports torch."""

import argparse
import json

from fairseq_posenc.analysis.listing import list_encodings
from fairseq_posenc.user_dir import USER_DIR


def add_list_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``fairseq-posenc list``."""
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def run_list(args: argparse.Namespace) -> int:
    """Print a line for each encoding, or everything about them as JSON."""
    entries = list_encodings()
    if args.json:
        from fairseq_posenc.analysis import catalogue  # imports torch

        facts = [catalogue.collect_facts(entry.name) for entry in entries]
        print(json.dumps(facts, indent=2))
        return 0
    name_width = max(len(entry.name) for entry in entries)
    acts_on_width = max(len(entry.acts_on) for entry in entries)
    for name, acts_on, summary in entries:
        print(f"{name:<{name_width}}  {acts_on:<{acts_on_width}}  {summary.replace('``', '')}")
    return 0


def run_user_dir(args: argparse.Namespace) -> int:
    """Print the path of the package."""
    print(USER_DIR)
    return 0
