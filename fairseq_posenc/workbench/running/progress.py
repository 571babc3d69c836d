"""Prints progress on standard error; standard output is for results."""

import sys
from functools import partial

from tqdm import tqdm

from fairseq_posenc.errors import printable_lines

# Shown only on a terminal; the time left is estimated from the mean speed, not the latest.
bar = partial(tqdm, unit_scale=True, smoothing=0, disable=None)


def say(text: str) -> None:
    """Print a line at once, above any progress bar, with control characters escaped."""
    tqdm.write(printable_lines(text), file=sys.stderr)  # which Python flushes at each line
