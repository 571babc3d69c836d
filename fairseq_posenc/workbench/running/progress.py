"""Progress on standard error; standard output is for results."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from tqdm import tqdm

from fairseq_posenc.errors import printable_lines


def say(text: str) -> None:
    """Print a line at once, with control characters written out; above a bar that is shown."""
    tqdm.write(printable_lines(text), file=sys.stderr)
    sys.stderr.flush()


def bar(label: str, total: int, unit: str) -> Any:
    """Create tqdm's progress bar, which is shown on a terminal only.

    Args:
        label: what stands before it.
        total: its length; 0 for no bar.
        unit: of the length, as in ``" tokens"``.
    """
    hidden = not total or None  # None hides it unless there is a terminal
    return tqdm(
        desc=label, total=total, unit=unit, unit_scale=True, file=sys.stderr, disable=hidden
    )


def format_counts(counts: Mapping[str, int]) -> str:
    """Format counts in a line: ``1,200 items, 3 long lines``."""
    return ", ".join(f"{value:,} {name.replace('_', ' ')}" for name, value in counts.items())


def format_time(seconds: float) -> str:
    """Format a duration: ``45 s``, ``3 min 20 s``, ``2 h 5 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
