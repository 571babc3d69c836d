"""``fairseq-posenc preprocess``: runs a program of the folder ``preprocess/``."""

from __future__ import annotations

import argparse
import ast
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import FrameType

from fairseq_posenc.workbench.running.exit_codes import STOPPED
from fairseq_posenc.workbench.running.files import shipped

FOLDER = shipped("preprocess")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the name of a program, and its options."""
    programs = sorted(path.stem for path in FOLDER.glob("*.py"))
    text = "kind of text, see below; fairseq-posenc preprocess KIND --help lists its options"
    parser.add_argument("program", choices=programs, metavar="KIND", help=text)
    parser.add_argument("options", nargs=argparse.REMAINDER, metavar="...", help="options of KIND")
    width = max(map(len, programs))
    lines = []
    for name in programs:  # with the first line of its docstring
        program = ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))
        summary = str(ast.get_docstring(program)).partition("\n")[0]
        lines.append(f"  {name:<{width}}  {summary}")
    parser.epilog = "\n".join(lines)  # the command's parser keeps line breaks


def run(args: argparse.Namespace) -> int:
    """Run the program in this process, with its folder on the import path."""
    sys.argv = [f"fairseq-posenc preprocess {args.program}", *args.options]
    sys.path.insert(0, str(FOLDER))
    with _exit_on_ctrl_c():
        program = import_module(args.program)
    program.main()
    return 0


@contextmanager
def _exit_on_ctrl_c() -> Iterator[None]:
    """End the process at once on Ctrl-C, with the message and the exit code of all commands.

    While numpy and other modules are imported, they catch KeyboardInterrupt and raise other errors.
    """

    def end(number: int, frame: FrameType | None) -> None:
        os.write(2, b"fairseq-posenc: stopped\n")
        os._exit(STOPPED)

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # ignored, or handled by another program
        return
    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
