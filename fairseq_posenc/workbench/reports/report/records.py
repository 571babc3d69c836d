"""Records of any kind as tables: one for each kind, with the results of all its files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fairseq_posenc.workbench.results import markdown
from fairseq_posenc.workbench.results.record import Record, Row


def of_records(records: Mapping[Path, Record]) -> Iterator[str]:
    """Yield the sections of all kinds."""
    for kind in dict.fromkeys(record.kind for record in records.values()):
        chosen = {path: each for path, each in records.items() if each.kind == kind}
        yield markdown.plain(f"## Results of {kind}")
        yield "\n".join(f"{n}. {_about(*each)}" for n, each in enumerate(chosen.items(), start=1))
        yield _table(
            [(n, row) for n, each in enumerate(chosen.values(), start=1) for row in each.rows]
        )


def _about(path: Path, record: Record) -> str:
    """Return what a record is of: its command, its positions, its seed, its data."""
    facts = {"positions": record.spec, "seed": record.seed, **record.data}
    told = "; ".join(
        f"{name}: {_show(value)}" for name, value in facts.items() if value is not None
    )
    command = f", `{record.command}`" if record.command else ""
    return markdown.plain(f"`{path.name}` in `{path.parent.name}`{command}: {told}")


def _table(rows: list[tuple[int, Row]]) -> str:
    """Return the rows of several records, each with its number, and those columns that any has."""
    columns = dict.fromkeys(
        name for _, row in rows for name, value in row.items() if value not in (None, "")
    )
    numbers = [all(not isinstance(row.get(name), str) for _, row in rows) for name in columns]
    cells = [[str(n), *(_show(row.get(name)) for name in columns)] for n, row in rows]
    return markdown.table(["", *columns], cells, "r" + "".join("lr"[each] for each in numbers))


def _show(value: Any) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
