"""``docs/benchmarks.md``: its tables and pictures are made from the kept measurements."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.results.markdown import table
from measuring import pictures, results
from measuring.results import Result

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"
Rows = list[dict[str, Any]]
SHORT, LONG = 1024, 4096  # lengths between which the growth of memory is told


def keep(result: Result, folder: Path = results.RESULTS, page: Path = PAGE) -> None:
    """Keep a measurement, and write the page anew."""
    results.save(result, folder)
    write(folder, page)


def write(folder: Path = results.RESULTS, page: Path = PAGE) -> None:
    """Write the generated parts of the page, and the pictures, from what is kept."""
    kept = results.load(folder)
    for result in kept:
        if has_picture(result):
            pictures.draw(result.rows, _picture(result, folder))
    page.write_text(text(page.read_text("utf-8"), kept), encoding="utf-8")


def text(old: str, kept: Iterable[Result]) -> str:
    """Return the page with everything between its markers made anew.

    Raises:
        UserError: a marker is missing.
    """
    kept = list(kept)
    for script, section in SECTIONS.items():
        start, end = f"<!-- {script}: generated -->", f"<!-- end of {script} -->"
        before, found, rest = old.partition(start)
        _, ends, after = rest.partition(end)
        if not found or not ends:
            raise UserError(f"docs/benchmarks.md has no line {start!r}, or none {end!r} after it")
        lines = [line for r in kept if r.script == script for line in [*_head(r), *section(r)]]
        body = "\n".join(lines) or "Nothing is kept yet."
        old = f"{before}{start}\n\n{body.strip()}\n\n{end}{after}"
    return old


def has_picture(result: Result) -> bool:
    """Return whether a measurement has several lengths to draw."""
    return result.script == "attention" and len({row["length"] for row in result.rows}) > 1


def growth(rows: Rows) -> list[str]:
    """Return a table of how the peaks grow with n, if both ends were measured; else nothing."""
    peaks: dict[Any, dict[int, int]] = {_line(row): {} for row in rows}
    for row in rows:
        peaks[_line(row)][row["length"]] = row["memory"]
    cells = [
        [
            *(scope, mode, f"`{encoding}`", backend, str(batch)),
            *(f"{found[n] / 1e6:,.1f}" for n in (SHORT, LONG)),
            f"{found[LONG] / found[SHORT]:.2f}",
            f"{found[LONG] / found[SHORT] / (LONG / SHORT):.2f}",
        ]
        for (scope, mode, encoding, backend, batch), found in peaks.items()
        if found.get(SHORT) and found.get(LONG)
    ]
    if not cells:
        return []
    ends = [f"MB, n = {SHORT:,}", f"MB, n = {LONG:,}", "growth", f"growth / {LONG // SHORT}"]
    header = ["scope", "mode", "encoding", "backend", "batch", *ends]
    return ["", "Growth of the peak, against linear growth:", "", table(header, cells, "llllr")]


def _line(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[key] for key in ("scope", "mode", "encoding", "backend", "batch"))


def _head(result: Result) -> list[str]:
    lines = [f"### {result.name}", "", f"    {result.command}", "", f"{result.machine}.", ""]
    if has_picture(result):
        name = _picture(result, Path("results")).as_posix()
        lines += [f"![time and memory against the length]({name})", ""]
    return lines


def _picture(result: Result, folder: Path) -> Path:
    return folder / f"{results.PREFIX}{result.name}.png"


def _attention(result: Result) -> list[str]:
    lines: list[str] = []
    for scope, mode in dict.fromkeys((row["scope"], row["mode"]) for row in result.rows):
        rows = [row for row in result.rows if (row["scope"], row["mode"]) == (scope, mode)]
        first = rows[0]
        facts = f"batch {first['batch']}, dropout {first['dropout']:g}, {first['dtype']}"
        lines += [f"**{scope}, {mode}**, {facts}: time / stock (time / `none`)", ""]
        lines += [_by_length(rows, lambda r: f"{r['ratio']:.2f} ({r['ratio_to_none']:.2f})"), ""]
        lines += [f"**{scope}, {mode}**: peak of memory in MB (/ stock)", ""]
        lines += [
            _by_length(rows, lambda r: f"{r['memory'] / 1e6:,.1f} ({r['memory_ratio']:.2f})"),
            "",
        ]
    return [*lines, *growth(result.rows), ""]


def _by_length(rows: Rows, cell: Callable[[dict[str, Any]], str]) -> str:
    lengths = sorted({row["length"] for row in rows})
    found = {(row["encoding"], row["backend"], row["length"]): cell(row) for row in rows}
    lines = dict.fromkeys((row["encoding"], row["backend"]) for row in rows)
    cells = [
        [f"`{encoding}`", backend, *(found.get((encoding, backend, n), "") for n in lengths)]
        for encoding, backend in lines
    ]
    return table(["encoding", "backend", *(f"n = {n:,}" for n in lengths)], cells, "llr")


def generate_table(rows: Rows) -> str:
    """Return the table of the speed of beam search."""
    header = ["encoding", "backend", "tokens/s", "speed / `sinusoidal`"]
    cells = [
        [
            *(f"`{row['encoding']}`", row["backend"]),
            *(f"{row['tokens_per_second']:,.1f}", f"{row['ratio']:.3f}"),
        ]
        for row in rows
    ]
    return table(header, cells, "llr")


def train_table(rows: Rows) -> str:
    """Return the table of whole updates."""
    header = ["encoding", "backend", "tokens/s", "time / stock", "TFLOP/s", "utilisation"]
    cells = [
        [
            *(f"`{row['encoding']}`", row["backend"], f"{row['tokens_per_second']:,.0f}"),
            *(f"{row['ratio']:.3f}", f"{row['flops'] / 1e12:.4g}", f"{row['utilisation']:.1%}"),
        ]
        for row in rows
    ]
    return table(header, cells, "llr")


def breakdown_table(rows: Rows) -> str:
    """Return the table of where the time goes."""
    parts = ["seconds", "products", "random", "softmax", "rest"]
    header = ["encoding", "backend", "time / stock", "ms", "matrix products"]
    header += ["random numbers", "softmax", "the rest"]
    cells = [
        [
            *(f"`{row['encoding']}`", row["backend"], f"{row['ratio']:.2f}"),
            *(f"{row[part] * 1e3:,.1f}" for part in parts),
        ]
        for row in rows
    ]
    return table(header, cells, "llr")


def reset_table(rows: Rows) -> str:
    """Return the table of what a reset costs."""
    header = ["encoding", "backend", "ms", "time with a reset / without", "lowest", "highest"]
    cells = [
        [
            *(f"`{row['encoding']}`", row["backend"], f"{row['seconds'] * 1e3:,.1f}"),
            *(f"{row[part]:.3f}" for part in ("ratio", "lowest", "highest")),
        ]
        for row in rows
    ]
    return table(header, cells, "llr")


SECTIONS: dict[str, Callable[[Result], list[str]]] = {
    "attention": _attention,
    "breakdown": lambda result: [breakdown_table(result.rows), ""],
    "generate": lambda result: [generate_table(result.rows), ""],
    "reset": lambda result: [reset_table(result.rows), ""],
    "train": lambda result: [train_table(result.rows), ""],
}
