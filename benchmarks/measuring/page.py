"""Saves measurements in docs/results, and writes the tables of docs/benchmarks.md.

Every script measures a list of rows, values by column; a saved measurement is a :class:`Result`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fairseq_posenc.workbench.results.markdown import fill_page, table
from fairseq_posenc.workbench.results.record import Record, read

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"
RESULTS = PAGE.parent / "results"
PREFIX, KIND_PREFIX = "benchmark_", "benchmark-"  # of the names of files, and of kinds of records
_REPEATED_ROWS_PREFIX = "layer_rows"  # of the names of results on layers whose tables repeat rows
Rows = list[dict[str, Any]]


class Result(NamedTuple):
    """A saved measurement."""

    name: str
    script: str
    command: str
    machine: str
    rows: Rows

    @property
    def section(self) -> str:
        """The section of the page that shows it."""
        return "repeated_rows" if self.name.startswith(_REPEATED_ROWS_PREFIX) else self.script


def save_result(result: Result, folder: Path = RESULTS, page: Path = PAGE) -> None:
    """Save a measurement as a file, a line for each row, and rewrite the page."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = {"rows": [_round_figures(row) for row in result.rows]}
    record = Record(
        f"{KIND_PREFIX}{result.script}", rows, {"machine": result.machine}, command=result.command
    )
    record.write(folder / f"{PREFIX}{result.name}.json")
    write_page(folder, page)


def _round_figures(row: Mapping[str, Any]) -> dict[str, Any]:
    """Round each figure to five digits; the noise is larger."""
    return {
        name: float(f"{value:.5g}") if isinstance(value, float) else value
        for name, value in row.items()
    }


def load_results(folder: Path = RESULTS) -> list[Result]:
    """Load all saved measurements, sorted by name."""
    results = []
    for path in sorted(folder.glob(f"{PREFIX}*.json")):
        record = read(path)
        name = path.stem.removeprefix(PREFIX)
        script = record.kind.removeprefix(KIND_PREFIX)
        rows = [dict(row) for row in record.figures["rows"]]
        results.append(Result(name, script, record.command, record.data["machine"], rows))
    return results


def write_page(folder: Path = RESULTS, page: Path = PAGE) -> None:
    """Write the generated parts of the page from the saved measurements."""
    text = fill_sections(page.read_text("utf-8"), load_results(folder))
    page.write_text(text, encoding="utf-8")


def fill_sections(text: str, results: Sequence[Result]) -> str:
    """Rewrite everything between the markers of the page's text.

    Raises:
        UserError: a marker is missing.
    """
    for section, format_results in SECTIONS.items():
        shown = [result for result in results if result.section == section]
        body = "Nothing is kept yet."
        if shown:
            body = "\n".join([*_list_commands(shown), *format_results(shown)]).strip()
        start = f"<!-- {section}: generated -->"
        end = f"<!-- end of {section} -->"
        text = fill_page(text, start, f"\n\n{body}\n\n", end)
    return text


def _list_commands(results: Iterable[Result]) -> list[str]:
    """List the commands of measurements, each with its machine."""
    by_machine: dict[str, list[str]] = {}
    for result in results:
        by_machine.setdefault(result.machine, []).append(f"    {result.command}")
    lines: list[str] = []
    for machine, commands in by_machine.items():
        lines += [f"{machine}:", "", *commands, ""]
    return lines


def _format_attention(results: Iterable[Result]) -> list[str]:
    """Format one table for the measurements at one length, and one for each at several."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        has_lengths = len({row["length"] for row in result.rows}) > 1
        groups.setdefault(result.name if has_lengths else "", []).append(result)
    lines: list[str] = []
    for name, group in groups.items():
        lines += [f"`{name}`:", ""] if name else []
        lines += [_tabulate_attention(group), ""]
    return lines


def _tabulate_attention(results: Iterable[Result]) -> str:
    """Format a table with a column for each scope, mode and length of a result."""
    cells: dict[str, dict[str, str]] = {}  # column -> row -> cell
    for result in results:
        # An encoding's first backend, the one that `auto` takes, is not named.
        first_backends: dict[str, str] = {}
        for row in result.rows:
            encoding, backend = row["encoding"], row["backend"]
            is_first = first_backends.setdefault(encoding, backend) == backend
            name = f"`{encoding}`" if is_first else f"`{encoding}`, {backend}"
            memory = f"{row['memory_ratio']:.2f}"
            if encoding == "stock":
                memory = f"{row['memory'] / 1e6:,.1f} MB"
            cell = f"{row['ratio']:.2f} ({memory})"
            cells.setdefault(_name_column(result, row), {})[name] = cell
    return _tabulate_encodings(cells)


def _name_column(result: Result, row: dict[str, Any]) -> str:
    """Name a column by what differs within a measurement, or by the measurement."""
    parts = []
    for key in ("scope", "mode", "length"):
        if any(other[key] != row[key] for other in result.rows):
            parts.append(f"n = {row[key]:,}" if key == "length" else row[key])
    return ", ".join(parts) or f"`{result.name}`"


def _tabulate_encodings(cells: Mapping[str, Mapping[str, str]]) -> str:
    """Format a row for each encoding, and a column for each measurement."""
    names = dict.fromkeys(name for column in cells.values() for name in column)
    rows = [[name, *(column.get(name, "-") for column in cells.values())] for name in names]
    return table(["encoding", *cells], rows)


_CONTENDER = {"encoding": "`{encoding}`", "backend": "{backend}"}
# Tables with a line for each row: script -> title of a column -> format of a row's values.
COLUMNS: dict[str, dict[str, str]] = {
    "attention": {
        "scope": "{scope}",
        "mode": "{mode}",
        **_CONTENDER,
        "n": "{length:,}",
        "batch": "{batch}",
        "dropout": "{dropout:g}",
        "time / stock": "{ratio:.2f}",
        "time / `none`": "{ratio_to_none:.2f}",
        "memory / stock": "{memory_ratio:.2f}",
        "ms": "{seconds:,.1f}",
        "MB": "{memory:,.1f}",
    },
    "generate": {
        **_CONTENDER,
        "tokens/s": "{tokens_per_second:,.1f}",
        "speed / `sinusoidal`": "{ratio:.3f}",
    },
    "train": {
        **_CONTENDER,
        "tokens/s": "{tokens_per_second:,.0f}",
        "time / stock": "{ratio:.3f}",
        "TFLOP/s": "{flops:.4g}",
        "utilization": "{utilization:.1%}",
    },
    "repeated_rows": {
        "pass": "{pass}",
        "n": "{length:,}",
        "encoding or model": "`{encoding}`",
        "ms": "{seconds:,.1f}",
        "time / `none`": "{ratio:.2f}",
    },
}
_ALIGN = {"attention": "llllr", "repeated_rows": "lrl"}  # else `llr`
# Seconds are shown as milliseconds, bytes as MB, operations per second as TFLOP/s.
_UNITS = {"flops": 1e-12, "memory": 1e-6, "seconds": 1e3}


def format_table(script: str, rows: Rows) -> str:
    """Format the rows of a script by :data:`COLUMNS`."""
    columns = COLUMNS[script]
    cells = []
    for row in rows:
        in_units = {name: row[name] * unit for name, unit in _UNITS.items() if name in row}
        cells.append([cell.format_map({**row, **in_units}) for cell in columns.values()])
    return table(list(columns), cells, _ALIGN.get(script, "llr"))


def _format_each(results: Iterable[Result]) -> list[str]:
    """Format a table for each measurement, by its script's columns."""
    lines: list[str] = []
    for result in results:
        lines += [format_table(result.script, result.rows), ""]
    return lines


def _format_repeated_rows(results: Iterable[Result]) -> list[str]:
    """Format one table of all layers, and one for each measurement of decoding."""
    layers = [result for result in results if result.script == "attention"]
    lines = [_tabulate_layers(layers), ""] if layers else []
    return lines + _format_each(result for result in results if result not in layers)


def _tabulate_layers(results: Iterable[Result]) -> str:
    """Format times and memory of layers divided by those of ``none`` on the same backend."""
    cells: dict[str, dict[str, str]] = {}
    for result in results:
        plain = {
            (row["length"], row["backend"]): row["memory"]
            for row in result.rows
            if row["encoding"] == "none"
        }
        for row in result.rows:
            if row["encoding"] in ("stock", "none"):
                continue
            column = f"{row['mode']}, {row['batch']} x {row['length']:,}"
            memory = row["memory"] / plain[row["length"], row["backend"]]
            cell = f"{row['ratio_to_none']:.2f} ({memory:.2f})"
            cells.setdefault(column, {})[f"`{row['encoding']}`"] = cell
    return _tabulate_encodings(cells)


# Section of the page -> what formats its results.
SECTIONS: dict[str, Callable[[Sequence[Result]], list[str]]] = {
    "attention": _format_attention,
    "train": _format_each,
    "repeated_rows": _format_repeated_rows,
}
