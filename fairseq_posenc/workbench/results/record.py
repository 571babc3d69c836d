"""Records: the figures of a command in JSON, with their data and the command line."""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Optional

from fairseq_posenc.errors import shortened
from fairseq_posenc.files import write_whole

VERSION = 1  # version of the format
Row = Mapping[str, Any]  # texts and numbers by column; None for a missing figure


class RecordError(Exception):
    """A file is not a record, or is a record of another version; the message says which."""


@dataclass(frozen=True)
class Record:
    """The results of a command."""

    kind: str  # the command, such as `compare`
    figures: Mapping[str, Sequence[Row]]  # tables by name; the first has the main results
    data: Row  # facts by name, such as the text or its folder, the checkpoint and the machine
    spec: Optional[str] = None  # position encodings, if they are the same in all rows and known
    seed: Optional[int] = None  # seed, if it is the same in all rows
    command: str = ""  # command line
    version: int = VERSION  # version of the format

    @property
    def rows(self) -> Sequence[Row]:
        """The rows of the first table."""
        return next(iter(self.figures.values()), ())

    def text(self) -> str:
        """Format the record as JSON, a line for each row."""
        lines = [
            f" {json.dumps(field.name)}: {_json(getattr(self, field.name))}"
            for field in fields(self)
            if field.name != "figures"
        ]
        tables = [
            f"  {json.dumps(name)}: [\n" + ",\n".join(f"   {_json(row)}" for row in rows) + "\n  ]"
            for name, rows in self.figures.items()
        ]
        lines.append(' "figures": {\n' + ",\n".join(tables) + "\n }")
        return "{\n" + ",\n".join(lines) + "\n}"

    def write(self, path: Path) -> None:
        """Write the record into a file."""
        write_whole(path, self.text() + "\n")


def own_command() -> str:
    """Return the command line of this program."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


def read(path: Path) -> Record:
    """Read the record of a file.

    Raises:
        RecordError: the file is not a record, or is a record of another version.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecordError(f"cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise RecordError(f"not a complete JSON file ({shortened(str(error))})") from None
    if not isinstance(content, dict) or not {"kind", "version", "figures"} <= content.keys():
        raise RecordError("not a record of fairseq-posenc")
    if content["version"] != VERSION:
        version = shortened(str(content["version"]))
        raise RecordError(f"a record of version {version}; this program reads version {VERSION}")
    if not _is_valid(content):
        raise RecordError("a damaged record: its 'data' or 'figures' are invalid")
    names = {field.name for field in fields(Record)}
    return Record(**{"data": {}, **{name: content[name] for name in names & content.keys()}})


def _is_valid(content: Mapping[str, Any]) -> bool:
    """Check that tables are lists of rows, and rows objects of texts and numbers."""
    tables = content["figures"]
    if not isinstance(tables, dict) or not all(
        isinstance(table, list) for table in tables.values()
    ):
        return False
    rows = [content.get("data", {}), *(row for table in tables.values() for row in table)]
    return all(isinstance(row, dict) for row in rows) and all(
        isinstance(value, (str, int, float, type(None))) for row in rows for value in row.values()
    )


def _json(value: Any) -> str:
    """Format a value or row as JSON, with null for NaN and infinite figures."""
    if isinstance(value, Mapping):
        value = {
            name: None if isinstance(item, float) and not math.isfinite(item) else item
            for name, item in value.items()
        }
    return json.dumps(value, ensure_ascii=False)
