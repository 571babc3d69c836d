"""Prints progress on standard error; standard output is for results."""

import sys
from typing import Any

from tqdm import tqdm

from fairseq_posenc.errors import printable_lines


def say(text: str) -> None:
    """Print a line at once, above any progress bar, with control characters escaped."""
    tqdm.write(printable_lines(text), file=sys.stderr)
    sys.stderr.flush()


def bar(label: str, total: int, unit: str, initial: int = 0) -> Any:
    """Create a tqdm progress bar, which is shown only on a terminal.

    Args:
        label: text before the bar.
        total: length of the bar.
        unit: unit of the length, as in ``" tokens"``.
        initial: what was done before; the time left is estimated from the rest.
    """
    return tqdm(
        desc=label,
        total=total,
        unit=unit,
        unit_scale=True,
        initial=initial,
        smoothing=0,
        file=sys.stderr,
        disable=None,  # hidden unless there is a terminal
    )
