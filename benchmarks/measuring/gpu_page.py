"""What ``make gpu`` found, as tables: on the screen, in its folder, and in ``docs/gpu.md``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fairseq_posenc.workbench.results.markdown import fill_page, table
from fairseq_posenc.workbench.results.record import Record
from measuring.results import RESULTS

PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"
KEPT = RESULTS / "gpu.json"
START, END = "<!-- gpu: generated -->", "<!-- end of gpu -->"
LONG = 8192
# One layer of DeBERTa-base on an H200, bfloat16, forward and backward (huggingface/transformers,
# pull request 48176): who, and milliseconds.
PUBLISHED = [["eager, as published", "", "119.3"], ["DisentangledFlash, as published", "", "88.9"]]

Results = list[dict[str, Any]]


def tables(results: Results) -> list[str]:
    """Format the results as Markdown."""
    cells = [[x["step"], x["end"], f"{x['seconds']:.0f}"] for x in results]
    lines = [table(["step", "end", "seconds"], cells, "llr"), *_compare_with_published(results)]
    for result in results:
        if rows := result.get("rows"):
            header = list(rows[0])
            cells = [[_cell(row[x]) for x in header] for row in rows]
            lines += ["", f"**{result['step']}**", "", table(header, cells, "lllllr")]
    return lines


def keep(path: Path, kept: Path = KEPT, page: Path = PAGE) -> None:
    """Keep a file of results, and write the page's tables from it.

    Raises:
        UserError: the page has lost a marker.
    """
    results = json.loads(path.read_text("utf-8"))
    body = "\n".join(tables(results))
    text = fill_page(page, START, f"\n\n{body}\n\n", END)
    steps = [{name: x[name] for name in ("step", "end", "seconds")} for x in results]
    rows = {x["step"]: x["rows"] for x in results if x.get("rows")}
    Record("benchmark-gpu", {"steps": steps, **rows}, {}, command="make gpu").write(kept)
    page.write_text(text, encoding="utf-8")


def _compare_with_published(results: Results) -> list[str]:
    """Format DeBERTa's layer at the published length beside the published times."""
    rows = [row for result in results for row in result.get("rows", [])]
    ours = [
        [f"`{row['encoding']}`, {row['backend']}", f"{row['dropout']:g}", _ms(row)]
        for row in rows
        if row["encoding"].startswith("deberta")
        and (row.get("scope"), row["length"], row["dtype"]) == ("layer", LONG, "bfloat16")
    ]
    if not ours:
        return []
    title = f"**A layer of DeBERTa-base at n = {LONG:,}**, forward and backward, bfloat16"
    return ["", title, "", table(["who", "dropout", "ms"], [*PUBLISHED, *ours], "llr")]


def _ms(row: dict[str, Any]) -> str:
    return f"{row['seconds'] * 1e3:.1f}"


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
