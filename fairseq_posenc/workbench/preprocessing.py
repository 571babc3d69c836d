"""``fairseq-posenc preprocess``: starts a program of ``preprocess/``."""

from __future__ import annotations

import argparse
import os
import sys

from fairseq_posenc.workbench.running.files import shipped

FOLDER = shipped("preprocess")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the name of a program, and its options."""
    programs = sorted(path.stem for path in FOLDER.glob("*.py"))
    parser.add_argument("program", choices=programs, help="program; see PROGRAM --help")
    parser.add_argument("options", nargs=argparse.REMAINDER, metavar="...", help="its options")


def run(args: argparse.Namespace) -> int:
    """Replace this process by the program."""
    program = str(FOLDER / f"{args.program}.py")
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, program, *args.options])
