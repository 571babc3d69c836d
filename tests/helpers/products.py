"""The cases of tests that have several axes: a choice of their product, or the whole of it.

Most faults show at one value of one axis, whatever the others are. So a choice has each value of
each axis at least once, beside values of the others that are drawn. ``make test-trust`` and
``make matrix`` set WHOLE_PRODUCTS=1, and run all; ``tests/helpers/mutants.py`` shows what a choice
finds.
"""

from __future__ import annotations

import itertools
import math
import os
import random
from collections.abc import Collection
from typing import Any

WHOLE = os.environ.get("WHOLE_PRODUCTS", "0") != "0"


def some_of(chosen: Collection[Any], every: Collection[Any], whole: bool = WHOLE) -> list[Any]:
    """Return chosen values of an axis, if their kind alone matters; all, for whole products."""
    return list(every if whole else chosen)


def product_of(*axes: Collection[Any], times: int = 1, whole: bool = WHOLE) -> list[Any]:
    """Return the cases of a test, for parametrize: a value of each axis, in the axes' order.

    Tuples are several arguments of the test. Unless ``whole``, each value of the longest axis is
    drawn ``times`` times, and the others as often in turn.
    """
    sizes = [len(axis) for axis in axes]
    rows = times * max(sizes)
    if whole or rows >= math.prod(sizes):
        chosen = list(itertools.product(*map(range, sizes)))
    else:
        draw = random.Random(0)
        columns = []
        for size in sizes:
            turns = [draw.sample(range(size), size) for _ in range(-(-rows // size))]
            columns.append(list(itertools.chain(*turns))[:rows])
        chosen = sorted(set(zip(*columns)))
    values = [list(axis) for axis in axes]
    cases = [tuple(column[n] for column, n in zip(values, case)) for case in chosen]
    return [sum((x if isinstance(x, tuple) else (x,) for x in case), ()) for case in cases]
