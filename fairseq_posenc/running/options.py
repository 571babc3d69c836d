"""Options that several commands have: where two commands have one of a name, it is the same."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path
from typing import Optional


def add_data(parser: ArgumentParser, what: str, required: bool = False) -> None:
    """Add ``--data``, the data-bin; ``what`` says of which kind, and what is taken without it."""
    parser.add_argument("--data", type=Path, metavar="DIR", required=required, help=what)


def add_out(parser: ArgumentParser, default: Optional[str] = None, told: str = "") -> None:
    """Add ``--out``, the folder of the results.

    Args:
        parser: gets it.
        default: the folder without it.
        told: where that depends on other options, its name; without either, ``--out`` is required.
    """
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        default=Path(default) if default else None,
        required=not (default or told),
        help="folder of the results"
        + (f" (default: {default or told})" if default or told else ""),
    )


def add_split(parser: ArgumentParser, default: str) -> None:
    """Add ``--split``, the part of the data."""
    parser.add_argument("--split", default=default, help="part of the data (default: %(default)s)")


def add_device(parser: ArgumentParser) -> None:
    """Add ``--device``."""
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="to compute on (default: a GPU if there is one)"
    )


def add_precision(parser: ArgumentParser, bf16: bool = True) -> None:
    """Add ``--fp16`` and, where it can be had, ``--bf16``."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--fp16", action="store_true", help="half precision, on a GPU")
    if bf16:
        group.add_argument("--bf16", action="store_true", help="bfloat16")


def add_seeds(parser: ArgumentParser, default: str) -> None:
    """Add ``--seeds``; ``default`` says what is taken without it."""
    text = f"a run for each, as in 1,2,3 (default: {default})"
    parser.add_argument("--seeds", type=_seeds, metavar="N,N", help=text)


def add_jobs(parser: ArgumentParser, default: str) -> None:
    """Add ``--jobs``; ``default`` says what is taken without it."""
    text = f"runs at a time (default: {default})"
    parser.add_argument("--jobs", type=count, metavar="N", help=text)


def add_set(parser: ArgumentParser, example: str) -> None:
    """Add ``--set``, which overrides settings of fairseq's configuration."""
    parser.add_argument(
        "--set",
        dest="changes",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help=f"override a setting of fairseq's, as in {example}; can be repeated",
    )


def add_json(parser: ArgumentParser) -> None:
    """Add ``--json``."""
    parser.add_argument("--json", action="store_true", help="print the record, which is JSON")


def show_examples(parser: ArgumentParser, lines: Sequence[str]) -> None:
    """End the help with examples, each a whole command."""
    parser.formatter_class = RawDescriptionHelpFormatter
    before = f"{parser.epilog.rstrip()}\n\n" if parser.epilog else ""
    parser.epilog = before + "\n  ".join(["examples:", *lines])


def count(text: str) -> int:
    """Return a whole number of at least 1.

    Raises:
        ArgumentTypeError: it is none.
    """
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"must be a whole number of at least 1, not '{text}'")
    return int(text)


def _seeds(text: str) -> list[int]:
    found = [count(part) for part in text.split(",")]
    if len(set(found)) < len(found):
        raise ArgumentTypeError(f"{text}: a number is given twice")
    return found
