"""``fairseq-posenc preprocess``: runs a program of the folder ``preprocess/``.

A program is a module with ``add_arguments(parser)`` and ``run(args)``; its docstring is its help.
"""

import argparse
import ast
import os
import signal
import sys
from importlib import import_module
from types import FrameType

from fairseq_posenc.user_dir import find_shipped_folder
from fairseq_posenc.workbench.running.exit_codes import STOPPED
from fairseq_posenc.workbench.running.options import Parser

FOLDER = find_shipped_folder("preprocess")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the name of a program, which is called KIND in the help, and its options."""
    programs = sorted(path.stem for path in FOLDER.glob("*.py"))
    help_text = "kind of text, see below; fairseq-posenc preprocess KIND --help lists its options"
    parser.add_argument("program", choices=programs, metavar="KIND", help=help_text)
    parser.add_argument("options", nargs=argparse.REMAINDER, metavar="...", help="options of KIND")
    width = max(map(len, programs))
    lines = []
    for name in programs:  # parsed, as importing all of them would take seconds
        program = ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))
        lines.append(f"  {name:<{width}}  {str(ast.get_docstring(program)).splitlines()[0]}")
    parser.epilog = "\n".join(lines)  # the command's parser keeps line breaks


def run(args: argparse.Namespace) -> None:
    """Run the program in this process.

    Its folder is put on the import path, from which it imports the packages beside it.
    """
    sys.path.insert(0, str(FOLDER))
    # numpy and others turn a KeyboardInterrupt in their import into other errors: exit at once.
    before = signal.getsignal(signal.SIGINT)  # a handler that is not Python's stays
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit_at_once)
    try:
        program = import_module(args.program)
    finally:
        if before is signal.default_int_handler:
            signal.signal(signal.SIGINT, before)
    parser = Parser(prog=f"fairseq-posenc preprocess {args.program}", description=program.__doc__)
    program.add_arguments(parser)
    program.run(parser.parse_args(args.options))


def _exit_at_once(number: int, frame: FrameType | None) -> None:
    os.write(2, b"fairseq-posenc: stopped\n")
    os._exit(STOPPED)
