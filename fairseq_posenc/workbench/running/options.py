"""Command-line options that several commands share, each defined once.

``add_data`` adds ``--data``, and so on; ``text`` is the help, ``computed`` describes a default that
the command computes. :class:`Parser` turns argparse's errors about values into a UserError.
"""

import os
from argparse import ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from fairseq_posenc.errors import UserError
from fairseq_posenc.folders import LOCK


class Parser(ArgumentParser):
    """A parser that raises its errors as :class:`UserError` and keeps line breaks in help texts."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, formatter_class=RawDescriptionHelpFormatter)
        self.register("type", Path, path)  # what argparse calls for `type=Path`

    def error(self, message: str) -> NoReturn:
        """Raise argparse's message as a UserError."""
        raise UserError(f"{message} (see {self.prog} --help)")


def add_data(parser: ArgumentParser, text: str, required: bool = False) -> None:
    """Add ``--data``, the data-bin; ``text`` names the kind of data and the default."""
    parser.add_argument("--data", type=data_path, metavar="DIR", required=required, help=text)


def add_out(parser: ArgumentParser, default: str | None = None, computed: str = "") -> None:
    """Add ``--out``, which is required if it has no default, neither given nor computed."""
    shown = default or computed
    text = "folder of the results" + (f" (default: {shown})" if shown else "")
    add = parser.add_argument
    add("--out", type=data_path, metavar="DIR", default=default, required=not shown, help=text)


def add_precision(parser: ArgumentParser) -> None:
    """Add ``--fp16`` and ``--bf16``; see :mod:`.devices`."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--fp16", action="store_true", help="half precision, on a GPU")
    group.add_argument("--bf16", action="store_true", help="bfloat16")


def add_count(parser: ArgumentParser, name: str, text: str, default: int | None = None) -> None:
    """Add an option ``name`` whose value is an integer of at least 1."""
    text += f" (default: {default})" if default else ""
    parser.add_argument(name, type=positive_int, metavar="N", default=default, help=text)


def add_seeds(parser: ArgumentParser, default: str | None = None, computed: str = "") -> None:
    """Add ``--seeds``, whose default is given or computed."""
    text = f"random seeds, one run per seed, as in 1,2,3 (default: {default or computed})"
    seeds = partial(positive_ints, most=2**32 - 1)  # numpy takes no larger ones
    parser.add_argument("--seeds", type=seeds, metavar="N,N", default=default, help=text)


def add_on(parser: ArgumentParser, example: str) -> None:
    """Add ``--on``, where the runs are executed (:func:`parse_slurm`)."""
    text = f"local (default), or slurm with options of sbatch, as in slurm {example}"
    parser.add_argument("--on", nargs="+", default=["local"], metavar="WHERE", help=text)


def parse_slurm(words: Sequence[str]) -> dict[str, str | bool] | None:
    """Parse the value of ``--on``: options of sbatch by long name, flags as True; None if local.

    Raises:
        UserError: an unknown place, no time limit, or an option by which the jobs are found.
    """
    if words == ["local"]:
        return None
    given = {k: v or True for k, _, v in (x.lstrip("-").partition("=") for x in words[1:])}
    if words[0] != "slurm" or given.get("time", True) is True or {*given} & {"array", "job-name"}:
        form = "local, or slurm with time= and other options of sbatch, as in slurm time=12:00:00"
        raise UserError(f"--on {' '.join(words)}: write {form}, without array or job-name")
    return given


def path(text: str) -> Path:
    """Parse the path of a file or folder; refuse an empty one, which pathlib takes for ``.``."""
    if not text.strip():
        raise ArgumentTypeError("the name is empty; the current folder is .")
    return Path(text)


def data_path(text: str) -> Path:
    """Parse the path of a folder for fairseq; refuse colons, at which fairseq splits paths."""
    if ":" in text:
        raise ArgumentTypeError(f"'{text}': fairseq splits names at ':'; name a folder without one")
    return path(text)


def positive_int(text: str, most: int = 10**12) -> int:
    """Parse an integer from 1 to ``most``; refuse anything else."""
    number = int(text[:99]) if text.isdecimal() else 0  # Python refuses thousands of digits
    if not 1 <= number <= most:
        bound = f"at most {most:,}" if number else "a whole number of at least 1"
        raise ArgumentTypeError(f"must be {bound}, not '{text}'")
    return number


def finite_number(text: str, most: float = 1e300) -> float:
    """Parse a number from ``-most`` to ``most``; refuse anything else, also NaN."""
    with suppress(ValueError):
        if abs(number := float(text)) <= most:
            return number
    raise ArgumentTypeError(f"must be a number from {-most:g} to {most:g}, not '{text}'")


def positive_numbers(text: str) -> tuple[float, ...]:
    """Parse numbers above 0, separated by commas; drop repeated ones."""
    numbers = tuple(dict.fromkeys(map(finite_number, text.split(","))))
    if min(numbers) <= 0:
        raise ArgumentTypeError(f"{text}: write numbers above 0, as in 0.001,0.003")
    return numbers


def positive_ints(text: str, most: int = 10**12) -> tuple[int, ...]:
    """Parse different integers from 1 to ``most``, separated by commas; sort them."""
    numbers = sorted(positive_int(part.strip(), most) for part in text.split(","))
    if len(set(numbers)) < len(numbers):
        raise ArgumentTypeError(f"{text}: a number occurs twice")
    return tuple(numbers)


def parse_named(texts: Sequence[str], form: str, *files: str) -> dict[str, str]:
    """Parse arguments ``NAME=VALUE``, of the ``form`` in the message, into values by name.

    A name may be a spec, as in ``m4(max_distance=64)=model.pt``, but not one of ``files``.

    Raises:
        UserError: an argument has another form, or a name occurs twice or cannot name a folder.
    """
    named: dict[str, str] = {}
    for text in texts:
        equals = [index for index, sign in enumerate(text) if sign == "="]
        # The name ends at the first "=" that is not in brackets.
        end = next((i for i in equals if text.count("(", 0, i) == text.count(")", 0, i)), len(text))
        name, value = text[:end].strip(), text[end + 1 :].strip()
        if not name or not value:
            raise UserError(f"cannot read {text!r}: write {form}")
        if name in (*named, *files, LOCK, ".", "..") or "/" in name:
            needed = "no file of the results has" if name in (*files, LOCK) else "a folder can have"
            raise UserError(f"{name!r}: each value needs its own name, which {needed}")
        named[name] = value
    return named


def split_paths(text: str, name: str) -> list[str]:
    """Split the paths of ``name`` at commas, except in names of existing files.

    Raises:
        UserError: a path is empty, or occurs twice.
    """
    parts = text.split(",")
    heads = [",".join(parts[:end]) for end in range(1, len(parts) + 1)]  # possible first paths
    first = next(filter(os.path.exists, reversed(heads)), heads[0])  # too long a name is no file
    others = split_paths(text[len(first) + 1 :], name) if first != text else []
    if not first or Path(first).resolve() in map(Path.resolve, map(Path, others)):
        fault = f"{first}: occurs twice" if first else "a path before or after a comma is empty"
        raise UserError(f"{name}: {fault}; name each path once")
    return [first, *others]
