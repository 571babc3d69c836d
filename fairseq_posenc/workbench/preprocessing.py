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
    what = "kind of text, one of those below; fairseq-posenc preprocess KIND --help has its options"
    parser.add_argument("program", choices=programs, metavar="KIND", help=what)
    parser.add_argument("options", nargs=argparse.REMAINDER, metavar="...", help="options of KIND")
    width = max(map(len, programs))
    parser.epilog = "\n".join(f"  {name:<{width}}  {_summarise(name)}" for name in programs)


def _summarise(program: str) -> str:
    """Read the first line of a program's docstring."""
    source = (FOLDER / f"{program}.py").read_text(encoding="utf-8")
    return source.partition('"""')[2].partition("\n")[0].removesuffix('"""')


def run(args: argparse.Namespace) -> int:
    """Replace this process by the program."""
    program = str(FOLDER / f"{args.program}.py")
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, program, *args.options])
