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

from fairseq_posenc.errors import UserError
from fairseq_posenc.files import write_whole
from fairseq_posenc.folders import read_json

VERSION = 1  # version of the format
Row = Mapping[str, Any]  # texts and numbers by column; None for a missing figure


@dataclass(frozen=True)
class Record:
    """The results of a command."""

    kind: str  # the command, such as `compare`
    figures: Mapping[str, Sequence[Row]]  # tables by name; the first has the main results
    data: Row  # facts by name, such as the text or its folder, the checkpoint and the machine
    spec: Optional[str] = None  # position encodings, if they are the same in all rows and known
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
        UserError: the file is not a record, or is a record of another version.
    """
    content = read_json(path)
    if not isinstance(content, dict) or content.keys() != {field.name for field in fields(Record)}:
        raise UserError(f"{path}: not a record of fairseq-posenc")
    if content["version"] != VERSION:
        raise UserError(f"{path}: a record of version {content['version']}; this is {VERSION}")
    return Record(**content)


def _json(value: Any) -> str:
    """Format a value or row as JSON, with null for NaN and infinite figures."""
    if isinstance(value, Mapping):
        value = {
            name: None if isinstance(item, float) and not math.isfinite(item) else item
            for name, item in value.items()
        }
    return json.dumps(value, ensure_ascii=False)
