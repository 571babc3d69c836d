"""Computes how costs grow with a size, and formats the table of ``benchmarks/complexity.py``."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fairseq_posenc.workbench.results.markdown import table
from fairseq_posenc.workbench.results.record import Row
from fairseq_posenc.workbench.training import recipes

SCALES = {"numbers": 1e-6, "operations": 1e-9}  # to millions and billions
# The rows of the M4M paper's table 1, by encoding.
TABLE1 = {row["position_encoding"]: row for row in recipes.load()["reported"]["A1"]["rows"]}


def growth(small: Row, large: Row, cost: str, size: str) -> float | None:
    """Compute how often a cost doubles when a size doubles; None if the cost is 0."""
    if min(small[cost], large[cost]) <= 0:
        return None
    return math.log(large[cost] / small[cost]) / math.log(large[size] / small[size])


def complexity_table(rows: Sequence[Row]) -> str:
    """Format a row for each backend and encoding: costs at the longest length, and their growth.

    Growth with the length is that between the two longest lengths; growth with the width is that
    from the first width, at the length that was measured with several widths.
    """
    first_width = min(row["width"] for row in rows)
    cases = list(dict.fromkeys((row["backend"], row["encoding"]) for row in rows))
    lengths = sorted({row["length"] for row in rows if row["width"] == first_width})
    lines = []
    for backend, encoding in cases:
        selected = [row for row in rows if (row["backend"], row["encoding"]) == (backend, encoding)]
        by_length = {row["length"]: row for row in selected if row["width"] == first_width}
        wider = next(row for row in selected if row["width"] != first_width)
        longest = by_length[lengths[-1]]
        second_longest = by_length[lengths[-2]]
        paper = TABLE1[encoding]["texts"]["complexity"] if encoding in TABLE1 else ""
        cells = [f"`{encoding}`", backend, f"`{paper}`" if paper else "-"]
        for cost, scale in SCALES.items():
            by_n = growth(second_longest, longest, cost, "length")
            by_width = growth(by_length[wider["length"]], wider, cost, "width")
            cells.append(f"{longest[cost] * scale:,.3g}")
            cells.append(f"{longest[f'formula_{cost}'] * scale:,.3g}")
            cells.append(f"{_format_growth(by_n)}, {_format_growth(by_width)}")
        cells += [f"{by_length[n]['ratio']:.2f}" for n in lengths]
        lines.append(cells)
    header = ["encoding", "backend", "the paper's storage"]
    for cost in ("numbers, million", "operations, billion"):
        header += [cost, "formula", "growth with n, width"]
    header += [f"time / `none`, n = {n:,}" for n in lengths]
    return table(header, lines, "lllr")


def _format_growth(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}".replace("-0.0", "0.0")
