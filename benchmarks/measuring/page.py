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


def _backend_table(rows: Rows, columns: dict[str, str]) -> str:
    """Format a line for each encoding and backend; columns are formats of a row, by title."""
    cells = [
        [
            f"`{row['encoding']}`",
            row["backend"],
            *(each.format_map(row) for each in columns.values()),
        ]
        for row in rows
    ]
    return table(["encoding", "backend", *columns], cells, "llr")


def _times(rows: Rows, factor: float, *names: str) -> Rows:
    """Multiply some figures of each row, to change their unit."""
    return [{**row, **{name: row[name] * factor for name in names}} for row in rows]


def generate_table(rows: Rows) -> str:
    """Format the speed of beam search."""
    columns = {"tokens/s": "{tokens_per_second:,.1f}", "speed / `sinusoidal`": "{ratio:.3f}"}
    return _backend_table(rows, columns)


def train_table(rows: Rows) -> str:
    """Format the speed of whole updates."""
    columns = {
        "tokens/s": "{tokens_per_second:,.0f}",
        "time / stock": "{ratio:.3f}",
        "TFLOP/s": "{flops:.4g}",
        "utilisation": "{utilisation:.1%}",
    }
    return _backend_table(_times(rows, 1e-12, "flops"), columns)


def breakdown_table(rows: Rows) -> str:
    """Format where the time goes."""
    parts = {
        "ms": "seconds",
        "matrix products": "products",
        "random numbers": "random",
        "softmax": "softmax",
        "the rest": "rest",
    }
    columns = {title: f"{{{name}:,.1f}}" for title, name in parts.items()}
    in_ms = _times(rows, 1e3, *parts.values())
    return _backend_table(in_ms, {"time / stock": "{ratio:.2f}", **columns})


def reset_table(rows: Rows) -> str:
    """Format what a reset costs."""
    columns = {
        "ms": "{seconds:,.1f}",
        "time with a reset / without": "{ratio:.3f}",
        "lowest": "{lowest:.3f}",
        "highest": "{highest:.3f}",
    }
    return _backend_table(_times(rows, 1e3, "seconds"), columns)


def serving_table(rows: Rows) -> str:
    """Format the speed of engines, and how equal what they find is to what fairseq finds."""
    sizes = [key.rpartition("_")[2] for key in rows[0] if key.startswith("ratio_")]
    beams = [key.rpartition("_")[2] for key in rows[0] if key.startswith("bleu_")]
    titles = ["engine"]
    titles += [f"sentences/s, batch {size} (times fairseq's)" for size in sizes]
    titles += [title.format(beam) for beam in beams for title in ("same, beam {}", "BLEU, beam {}")]
    cells = [
        [
            row["engine"],
            *(f"{row[f'sentences_per_second_{n}']:.1f} ({row[f'ratio_{n}']:.2f})" for n in sizes),
            *(
                text
                for n in beams
                for text in (
                    f"{row[f'same_beam_{n}']:,} of {row['sentences']:,}",
                    f"{row[f'bleu_beam_{n}']:.2f}",
                )
            ),
        ]
        for row in rows
    ]
    return table(titles, cells, "l")


SECTIONS: dict[str, Callable[[Result], list[str]]] = {
    "attention": _attention,
    "breakdown": lambda result: [breakdown_table(result.rows), ""],
    "generate": lambda result: [generate_table(result.rows), ""],
    "reset": lambda result: [reset_table(result.rows), ""],
    "serving": lambda result: [serving_table(result.rows), ""],
    "train": lambda result: [train_table(result.rows), ""],
}
