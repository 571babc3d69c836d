"""Records: the figures of a command in JSON, with their data and the command line.

Every command writes its results as a record, and ``fairseq-posenc report`` shows any record.
"""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

from fairseq_posenc.errors import shortened
from fairseq_posenc.files import write_whole

VERSION = 1  # version of the format
_HEAD_CHARACTERS = 4096  # they contain "kind"; without it a file is no record, and is not read on
Row = Mapping[str, Any]  # texts and numbers by column; None for a missing figure


class RecordError(Exception):
    """A file is not a record, or is a record of another version; the message says which."""


class Record(NamedTuple):
    """The results of a command."""

    kind: str  # the command, such as `compare`
    # tables by name; a table is a list of rows, and the first one holds the main results
    figures: Mapping[str, Sequence[Row]]
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
        head = {name: value for name, value in self._asdict().items() if name != "figures"}
        lines = [f" {json.dumps(name)}: {_json(value)}" for name, value in head.items()]
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
        with open(path, encoding="utf-8") as stream:
            text = stream.read(_HEAD_CHARACTERS)
            if '"kind"' not in text:
                raise RecordError("not a record of fairseq-posenc")
            content = json.loads(text + stream.read())
            # Half a surrogate pair, which JSON can hold, can be neither printed nor written.
            json.dumps(content, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise RecordError(f"not a complete JSON file ({shortened(str(error))})") from None
    except OSError as error:
        raise RecordError(f"cannot be read ({error.strerror})") from None
    return _check_content(content)


def _check_content(content: Any) -> Record:
    """Build a record from the JSON of a file, which may be anything."""
    if not isinstance(content, dict) or not {"kind", "version", "figures"} <= content.keys():
        raise RecordError("not a record of fairseq-posenc")
    if content["version"] != VERSION:
        version = shortened(str(content["version"]))
        raise RecordError(f"a record of version {version}; this program reads version {VERSION}")
    known = {name: value for name, value in content.items() if name in Record._fields}
    record = Record(**{"data": {}, **known})  # only the keys checked above are required
    is_valid = {
        "kind": isinstance(record.kind, str),
        "command": isinstance(record.command, str),
        "spec": isinstance(record.spec, (str, type(None))),
        "seed": isinstance(record.seed, (int, type(None))) and _is_value(record.seed),
        "data": _is_row(record.data),
        "figures": _are_tables(record.figures),
    }
    for name, valid in is_valid.items():
        if not valid:
            raise RecordError(f"a record whose {name!r} is invalid")
    return record


def _are_tables(figures: object) -> bool:
    return isinstance(figures, dict) and all(
        isinstance(table, list) and all(map(_is_row, table)) for table in figures.values()
    )


def _is_row(row: object) -> bool:
    return isinstance(row, dict) and all(map(_is_value, row.values()))


def _is_value(value: object) -> bool:
    if isinstance(value, int):  # JSON does not limit the number of digits
        return abs(value) < 2**63
    return isinstance(value, (str, float, type(None)))


def _json(value: Any) -> str:
    """Format a value or row as JSON, with null for NaN and infinite figures."""
    if isinstance(value, Mapping):
        value = {
            name: None if isinstance(item, float) and not math.isfinite(item) else item
            for name, item in value.items()
        }
    return json.dumps(value, ensure_ascii=False)
