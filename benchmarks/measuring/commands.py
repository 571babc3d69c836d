"""Options and output that the command lines of the benchmarks share."""

from __future__ import annotations

import argparse
import json
import math
import shlex
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

import fairseq_posenc
from fairseq_posenc.errors import UserError
from fairseq_posenc.folders import json_values
from fairseq_posenc.workbench.running.devices import count_cores
from measuring import page

DTYPES = ("float32", "bfloat16", "float16")  # names in torch


def new_parser(description: str | None) -> argparse.ArgumentParser:
    """Create a parser whose help shows the script's docstring as it is written."""
    layout = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=description, formatter_class=layout)


def add_training_options(
    parser: argparse.ArgumentParser, encodings: list[str], accepted: str = "specs, or all"
) -> None:
    """Add the options of scripts that measure training steps with some encodings."""
    add_encodings(parser, encodings, accepted)
    add = parser.add_argument
    add("--batch", type=int, help="sentences (default: 1 on the CPU, 8 on a GPU)")
    add("--dropout", type=float, default=0.1, help="in training (default: 0.1)")
    add_device(parser)
    add_turns(parser)


def add_encodings(
    parser: argparse.ArgumentParser, encodings: list[str], accepted: str = "specs, or all"
) -> None:
    """Add ``--encodings``; :meth:`measuring.families.Case.encodings` knows what ``all`` means."""
    chosen = f"{accepted} (default: {' '.join(encodings)})"
    parser.add_argument("--encodings", nargs="+", default=encodings, metavar="SPEC", help=chosen)


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add ``--dtype`` and ``--device``."""
    add = parser.add_argument
    add("--dtype", choices=DTYPES, help="(default: float32 on the CPU, bfloat16 on a GPU)")
    add("--device", type=torch.device, default="cpu", help="cpu or cuda (default: cpu)")


def add_threads_and_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--threads`` and ``--json``."""
    add = parser.add_argument
    threads = torch.get_num_threads()
    add("--threads", type=int, default=threads, help="threads of torch (default: %(default)s)")
    add("--json", action="store_true", help="print the rows as JSON, and nothing else")


def add_turns(parser: argparse.ArgumentParser) -> None:
    """Add the options of scripts whose passes take turns, with ``--threads`` and ``--json``."""
    add_threads_and_json(parser)
    add = parser.add_argument
    turns = "how often all passes take turns (default: %(default)s)"
    add("--rounds", type=int, default=7, help=turns)
    limit = "begin no round after so many seconds, once three are done (default: %(default)s)"
    add("--seconds", type=float, default=math.inf, help=limit)
    save = "keep the rows as docs/results/benchmark_NAME.json, and rewrite docs/benchmarks.md"
    add("--save", metavar="NAME", help=save)


def add_backends(parser: argparse.ArgumentParser) -> None:
    """Add ``--backends``, which :func:`~measuring.contenders.backend_names` reads."""
    text = "names, auto (what the package would choose) or all (default: auto)"
    parser.add_argument("--backends", nargs="+", default=["auto"], metavar="NAME", help=text)


def prepare(args: argparse.Namespace) -> None:
    """Check the device, set torch's threads, and replace a missing ``args.dtype`` by the default.

    Raises:
        UserError: the device does not exist.
    """
    if args.device.type == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch finds no GPU here")
    args.dtype = args.dtype or ("bfloat16" if args.device.type == "cuda" else "float32")
    torch.set_num_threads(args.threads)


def machine(device: torch.device) -> str:
    """Describe the processor or GPU, and the versions."""
    if device.type == "cuda":
        processor = f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
    else:
        name = subprocess.getoutput("lscpu | sed -n 's/^Model name: *//p'")
        processor = f"{name}, {count_cores()} cores, {torch.get_num_threads()} thread(s) used"
    return (
        f"{processor}; torch {torch.__version__}, Python {sys.version.split()[0]}, "
        f"fairseq-posenc {fairseq_posenc.__version__}"
    )


def own_command() -> str:
    """Build the command line of this script, as a reader would type it."""
    return shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])


def print_rows(
    args: argparse.Namespace, rows: page.Rows, format_table: Callable[[page.Rows], str]
) -> None:
    """Print the rows of a script: the machine and a table, or with ``--json`` nothing but JSON."""
    if args.json:
        print(json.dumps(json_values(rows), indent=1))
    else:
        print("\n".join([machine(args.device), "", format_table(rows)]))


def run_script(
    script: str,
    parse_args: Callable[[list[str]], argparse.Namespace],
    measure: Callable[[argparse.Namespace], page.Rows],
    format_table: Callable[[page.Rows], str] | None = None,
) -> None:
    """Read the command line, measure, print the rows, and keep them with ``--save``.

    By default, the table has the script's columns of :data:`measuring.page.COLUMNS`.
    """

    def main() -> None:
        args = parse_args(sys.argv[1:])
        prepare(args)
        rows = measure(args)
        print_rows(args, rows, format_table or partial(page.format_table, script))
        if args.save:
            place = machine(args.device)
            page.save_result(page.Result(args.save, script, own_command(), place, rows))

    exit_on_error(main)


def exit_on_error(main: Callable[[], None]) -> None:
    """Run a script; a user's mistake ends it with one line of text and exit status 1."""
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
