"""Keeps measurements in docs/results, and writes the tables and pictures of docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fairseq_posenc.workbench.results import pictures
from fairseq_posenc.workbench.results.markdown import fill_page, table
from fairseq_posenc.workbench.results.record import Record, read
from measuring.growth import complexity_table

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"
RESULTS = PAGE.parent / "results"
PREFIX, KIND = "benchmark_", "benchmark-"  # of the names of files and kinds
ROWS = "layer_rows"  # begins the names of measurements of layers whose tables repeat rows
Rows = list[dict[str, Any]]
PANELS = {"seconds": ("time of a pass, ms", 1e3), "memory": ("peak of memory, MB", 1e-6)}


class Result(NamedTuple):
    """A kept measurement."""

    name: str
    script: str
    command: str
    machine: str
    rows: Rows

    @property
    def section(self) -> str:
        """The section of the page that shows it."""
        return "repeated_rows" if self.name.startswith(ROWS) else self.script


def keep(result: Result, folder: Path = RESULTS, page: Path = PAGE) -> None:
    """Keep a measurement as a file, a line for each row, and rewrite the page."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = {"rows": [_round_figures(row) for row in result.rows]}
    record = Record(
        f"{KIND}{result.script}", rows, {"machine": result.machine}, command=result.command
    )
    record.write(folder / f"{PREFIX}{result.name}.json")
    write(folder, page)


def _round_figures(row: Mapping[str, Any]) -> dict[str, Any]:
    """Round each figure to five digits; the noise is larger."""
    return {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in row.items()}


def load(folder: Path = RESULTS) -> list[Result]:
    """Load all kept measurements by name."""
    results = []
    for path in sorted(folder.glob(f"{PREFIX}*.json")):
        kept = read(path)
        name, script = path.stem[len(PREFIX) :], kept.kind[len(KIND) :]
        rows = [dict(row) for row in kept.rows]
        results.append(Result(name, script, kept.command, kept.data["machine"], rows))
    return results


def write(folder: Path = RESULTS, page: Path = PAGE) -> None:
    """Write the generated parts of the page, and the pictures, from the kept measurements."""
    kept = load(folder)
    for result in kept:
        if has_picture(result):
            _draw(result.rows, _name_picture(result, folder))
    page.write_text(text(page.read_text("utf-8"), kept), encoding="utf-8")


def text(old: str, kept: Iterable[Result]) -> str:
    """Rewrite everything between the page's markers.

    Raises:
        UserError: a marker is missing.
    """
    kept = list(kept)
    for section, format_results in SECTIONS.items():
        start, end = f"<!-- {section}: generated -->", f"<!-- end of {section} -->"
        results = [result for result in kept if result.section == section]
        lines = (
            [*_list_commands(results), *format_results(results)]
            if results
            else ["Nothing is kept yet."]
        )
        body = "\n".join(lines).strip()
        old = fill_page(PAGE, start, f"\n\n{body}\n\n", end, old)
    return old


def has_picture(result: Result) -> bool:
    """Check whether a measurement has several lengths to draw."""
    return result.section == "attention" and len({row["length"] for row in result.rows}) > 1


def _list_commands(kept: Iterable[Result]) -> list[str]:
    """List the commands of measurements, each with its machine."""
    by_machine: dict[str, list[str]] = {}
    for result in kept:
        by_machine.setdefault(result.machine, []).append(f"    {result.command}")
    return [
        line
        for machine, commands in by_machine.items()
        for line in (f"{machine}:", "", *commands, "")
    ]


def _name_picture(result: Result, folder: Path) -> Path:
    return folder / f"{PREFIX}{result.name}.png"


def _draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw a PNG file: a row of panels for each scope and mode, time and memory side by side."""
    subjects = list(dict.fromkeys((row["scope"], row["mode"]) for row in rows))
    figure = pictures.new_figure(11, 4.2 * len(subjects), dpi=120)
    panels = figure.subplots(len(subjects), len(PANELS), squeeze=False)
    for subject, pair in zip(subjects, panels):
        chosen = [row for row in rows if (row["scope"], row["mode"]) == subject]
        for (key, (label, unit)), axes in zip(PANELS.items(), pair):
            _draw_panel(axes, chosen, key, unit)
            axes.set_title(f"{', '.join(subject)}: {label}", loc="left")
        pair[-1].legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, fontsize=8)
    pictures.save(figure, path)


def _draw_panel(axes: Any, rows: list[dict[str, Any]], key: str, unit: float) -> None:
    lines = dict.fromkeys((row["encoding"], row["backend"]) for row in rows)
    for number, (encoding, backend) in enumerate(lines):
        points = sorted(
            (row["length"], row[key] * unit)
            for row in rows
            if (row["encoding"], row["backend"]) == (encoding, backend)
        )
        style = pictures.line_style(number, pictures.COLOURS[1:])
        if stock := encoding == "stock":
            style = pictures.line_style(0)  # black
        name = "stock" if stock else f"{encoding} ({backend})"
        axes.plot(*zip(*points), marker="o", markersize=3, label=name, **style)
    lengths = sorted({row["length"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [f"{n:,}" for n in lengths])
    axes.minorticks_off()
    axes.set_xlabel("n")
    axes.grid(color=pictures.GRID, linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)


def _format_attention(kept: Iterable[Result]) -> list[str]:
    """Format one table for the measurements at one length, and one for each at several."""
    groups: dict[str, list[Result]] = {}
    for result in kept:
        groups.setdefault(result.name if has_picture(result) else "", []).append(result)
    return [line for group in groups.values() for line in _tabulate_attention(group)]


def _tabulate_attention(kept: Iterable[Result]) -> list[str]:
    lines: list[str] = []
    cells: dict[str, dict[str, str]] = {}
    for result in kept:
        if has_picture(result):
            name = _name_picture(result, Path("results")).as_posix()
            lines += [f"`{result.name}`:", "", f"![time and memory over the length]({name})", ""]
        first: dict[str, str] = {}  # backend of each encoding
        for row in result.rows:
            name, backend = f"`{row['encoding']}`", row["backend"]
            if first.setdefault(name, backend) != backend:
                name += f", {backend}"
            peak = f"{row['memory'] / 1e6:,.1f} MB"
            shown = peak if row["encoding"] == "stock" else f"{row['memory_ratio']:.2f}"
            cell = f"{row['ratio']:.2f} ({shown})"
            cells.setdefault(_name_column(result, row), {})[name] = cell
    return [*lines, _tabulate_encodings(cells), ""]


def _name_column(result: Result, row: dict[str, Any]) -> str:
    """Name a column by what differs within a measurement, or by the measurement."""
    differ = [key for key in ("scope", "mode", "length") if len({r[key] for r in result.rows}) > 1]
    shown = (f"n = {row[key]:,}" if key == "length" else row[key] for key in differ)
    return ", ".join(shown) or f"`{result.name}`"


def _tabulate_encodings(cells: Mapping[str, Mapping[str, str]]) -> str:
    """Format a row for each encoding, and a column for each measurement."""
    names = dict.fromkeys(name for column in cells.values() for name in column)
    rows = [[name, *(column.get(name, "-") for column in cells.values())] for name in names]
    return table(["encoding", *cells], rows)


# Columns of the tables of encodings and backends: by script, the format of each by its title.
COLUMNS: dict[str, dict[str, str]] = {
    "generate": {"tokens/s": "{tokens_per_second:,.1f}", "speed / `sinusoidal`": "{ratio:.3f}"},
    "train": {
        "tokens/s": "{tokens_per_second:,.0f}",
        "time / stock": "{ratio:.3f}",
        "TFLOP/s": "{flops:.4g}",
        "utilisation": "{utilisation:.1%}",
    },
    "breakdown": {
        "time / stock": "{ratio:.2f}",
        "ms": "{seconds:,.1f}",
        "matrix products": "{products:,.1f}",
        "random numbers": "{random:,.1f}",
        "softmax": "{softmax:,.1f}",
        "the rest": "{rest:,.1f}",
    },
    "reset": {
        "ms": "{seconds:,.1f}",
        "time with a reset / without": "{ratio:.3f}",
        "lowest": "{lowest:.3f}",
        "highest": "{highest:.3f}",
    },
}
_UNITS = {"flops": 1e-12} | dict.fromkeys(("seconds", "products", "random", "softmax", "rest"), 1e3)


def backend_table(script: str, rows: Rows) -> str:
    """Format the rows of a script of :data:`COLUMNS`, one for each encoding and backend."""
    columns, cells = COLUMNS[script], []
    for row in rows:
        shown = {name: row[name] * unit for name, unit in _UNITS.items() if name in row}
        figures = (cells.format_map({**row, **shown}) for cells in columns.values())
        cells.append([f"`{row['encoding']}`", row["backend"], *figures])
    return table(["encoding", "backend", *columns], cells, "llr")


def repeated_rows_table(rows: Rows) -> str:
    """Format the times of passes, with and without our positions."""
    cells = [
        [
            row["pass"],
            f"{row['length']:,}",
            f"`{row['encoding']}`",
            f"{row['seconds'] * 1e3:,.1f}",
            f"{row['ratio']:.2f}",
        ]
        for row in rows
    ]
    return table(["pass", "n", "encoding or model", "ms", "time / `none`"], cells, "lrl")


def given_positions_table(rows: Rows) -> str:
    """Format the times of self-attention with ``position_ids``, by that without them."""
    cells = [
        [
            f"`{row['encoding']}`",
            f"{row['length']:,}",
            f"{row['seconds'] * 1e3:,.1f}",
            f"{row['from_100']:.2f}",
            f"{row['gaps']:.2f}",
        ]
        for row in rows
    ]
    titles = ["encoding", "n", "ms without ids", "ids from 100 on", "ids with gaps"]
    return table(titles, cells, "l")


def _format_repeated_rows(kept: Sequence[Result]) -> list[str]:
    """Format one table of all layers, and one for each measurement of decoding."""
    layers = [result for result in kept if result.script == "attention"]
    tables = [_tabulate_layers(layers)] if layers else []
    tables += [repeated_rows_table(result.rows) for result in kept if result not in layers]
    return [line for text in tables for line in (text, "")]


def _tabulate_layers(kept: Iterable[Result]) -> str:
    """Format times and memory of layers divided by those of ``none`` on the same backend."""
    cells: dict[str, dict[str, str]] = {}
    for result in kept:
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


def serving_table(rows: Rows) -> str:
    """Format the speed of engines, and how far their translations equal fairseq's."""
    sizes = [key.rpartition("_")[2] for key in rows[0] if key.startswith("ratio_")]
    beams = [key.rpartition("_")[2] for key in rows[0] if key.startswith("bleu_")]
    titles = ["engine"]
    titles += [f"sentences/s, batch {size} (times fairseq's)" for size in sizes]
    parts = ("same, beam {}", "scores apart, beam {}", "BLEU, beam {}")
    titles += [title.format(beam) for beam in beams for title in parts]
    cells = [
        [
            row["engine"],
            *(f"{row[f'sentences_per_second_{n}']:.1f} ({row[f'ratio_{n}']:.2f})" for n in sizes),
            *(cell for n in beams for cell in _format_quality(row, n)),
        ]
        for row in rows
    ]
    return table(titles, cells)


def _format_quality(row: dict[str, Any], beam: str) -> list[str]:
    """Format how equal an engine's translations are to fairseq's, and how good."""
    apart = row[f"score_difference_beam_{beam}"]
    return [
        f"{row[f'same_beam_{beam}']:,} of {row['sentences']:,}",
        f"{apart:.0e}" if apart else "-",
        f"{row[f'bleu_beam_{beam}']:.2f}",
    ]


SECTIONS: dict[str, Callable[[Sequence[Result]], list[str]]] = {
    "attention": _format_attention,
    "train": lambda kept: [backend_table("train", result.rows) for result in kept],
    "serving": lambda kept: [serving_table(result.rows) for result in kept],
    "complexity": lambda kept: [complexity_table(result.rows) for result in kept],
    "repeated_rows": _format_repeated_rows,
    "given_positions": lambda kept: [given_positions_table(result.rows) for result in kept],
}
