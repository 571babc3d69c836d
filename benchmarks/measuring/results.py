"""What is measured: figures, how they are printed, and the files they are kept in."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fairseq_posenc.workbench.results.markdown import table
from fairseq_posenc.workbench.results.record import Record, read

RESULTS = Path(__file__).parents[2] / "docs" / "results"
PREFIX, KIND = "benchmark_", "benchmark-"  # of the names of files and kinds
JSON_KEYS = (
    *("scope", "device", "mode", "encoding", "backend"),
    *("length", "dropout", "ratio", "memory_ratio", "batch", "dtype", "seconds"),
)


class AttentionRow(NamedTuple):
    """Figures of an encoding on a backend; ratios are to fairseq's own attention."""

    scope: str  # ``op``, ``layer`` or ``model``
    device: str  # ``cpu`` or ``cuda``
    mode: str  # ``forward`` (evaluation) or ``training``
    encoding: str  # its spec, or ``stock``: fairseq's own again, which shows the noise
    backend: str  # what computed it
    length: int  # n, tokens of a sentence
    batch: int  # sentences
    dropout: float  # probability
    dtype: str  # type of the numbers
    seconds: float  # of a pass, median
    memory: int  # peak of a pass's own allocations in bytes
    ratio: float  # of times, the median over rounds
    ratio_to_none: float  # the same, to our attention without positions on the same backend
    memory_ratio: float  # of peaks


class Result(NamedTuple):
    """A kept measurement."""

    name: str
    script: str
    command: str
    machine: str
    rows: list[dict[str, Any]]


def as_json(rows: Iterable[AttentionRow]) -> str:
    """Format our rows as a JSON list of objects with :data:`JSON_KEYS`."""
    chosen = [row._asdict() for row in rows if row.encoding != "stock"]
    return json.dumps([{key: row[key] for key in JSON_KEYS} for row in chosen], indent=1)


def save(result: Result, folder: Path = RESULTS) -> Path:
    """Keep a measurement as a file, a line for each row."""
    path = folder / f"{PREFIX}{result.name}.json"
    folder.mkdir(parents=True, exist_ok=True)
    rows = {"rows": [_rounded(row) for row in result.rows]}
    data = {"machine": result.machine}
    Record(f"{KIND}{result.script}", rows, data, command=result.command).write(path)
    return path


def load(folder: Path = RESULTS) -> list[Result]:
    """Load all measurements that are kept, by name."""
    return [_result(path) for path in sorted(folder.glob(f"{PREFIX}*.json"))]


def _result(path: Path) -> Result:
    kept = read(path)
    name, script = path.stem[len(PREFIX) :], kept.kind[len(KIND) :]
    return Result(
        name, script, kept.command, kept.data["machine"], [dict(row) for row in kept.rows]
    )


def rows_table(rows: Iterable[AttentionRow]) -> str:
    """Format every row with all its figures as a Markdown table."""
    header = [
        *("scope", "mode", "encoding", "backend", "n", "batch", "dropout"),
        *("time / stock", "time / `none`", "memory / stock", "ms", "MB"),
    ]
    cells = (
        [
            *(row.scope, row.mode, f"`{row.encoding}`", row.backend),
            *(f"{row.length:,}", str(row.batch), f"{row.dropout:g}"),
            *(f"{row.ratio:.2f}", f"{row.ratio_to_none:.2f}", f"{row.memory_ratio:.2f}"),
            *(f"{row.seconds * 1e3:,.1f}", f"{row.memory / 1e6:,.1f}"),
        ]
        for row in rows
    )
    return table(header, cells, "llllr")


def _rounded(row: Mapping[str, Any]) -> dict[str, Any]:
    """Round each figure to five digits, more than the noise leaves."""
    return {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in row.items()}
