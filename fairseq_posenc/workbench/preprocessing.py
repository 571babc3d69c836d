"""``fairseq-posenc preprocess``: runs a program of the folder ``preprocess/``."""

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
from fairseq_posenc.workbench.running.files import find_shipped_folder

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
        summary = str(ast.get_docstring(program)).partition("\n")[0]
        lines.append(f"  {name:<{width}}  {summary}")
    parser.epilog = "\n".join(lines)  # the command's parser keeps line breaks


def run(args: argparse.Namespace) -> int:
    """Run the program in this process.

    Its folder is put on the import path, from which it imports the packages that lie beside it.
    """
    sys.argv = [f"fairseq-posenc preprocess {args.program}", *args.options]
    sys.path.insert(0, str(FOLDER))
    with _exit_on_ctrl_c():
        program = import_module(args.program)
    program.main()  # treats Ctrl-C itself
    return 0


@contextmanager
def _exit_on_ctrl_c() -> Iterator[None]:
    """End the process at once on Ctrl-C, with the message and the exit code of all commands.

    While numpy and other modules are imported, they catch KeyboardInterrupt and raise other errors.
    """

    def exit_at_once(number: int, frame: FrameType | None) -> None:
        os.write(2, b"fairseq-posenc: stopped\n")
        os._exit(STOPPED)

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # ignored, or handled by another program
        return
    signal.signal(signal.SIGINT, exit_at_once)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
