"""Records: the figures of a command in JSON, with their data and the command line."""

import json
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from fairseq_posenc.errors import UserError
from fairseq_posenc.files import write_whole
from fairseq_posenc.folders import json_values, read_json

_T = TypeVar("_T")
_K = TypeVar("_K")
Row = Mapping[str, Any]  # texts and numbers by column; None for a missing figure


@dataclass(frozen=True)
class Record:
    """The results of a command."""

    kind: str  # the command, such as `compare`
    figures: Mapping[str, Sequence[Row]]  # tables by name
    data: Mapping[str, Any]  # facts by name: the text or its folder, the checkpoint, the machine
    spec: str | None = None  # position encodings, if they are the same in all rows and known
    command: str = ""  # command line

    def write(self, path: Path) -> None:
        """Write the record into a file."""
        write_whole(path, json.dumps(json_values(vars(self)), indent=1, ensure_ascii=False) + "\n")


def group_by(items: Iterable[_T], key: Callable[[_T], _K]) -> dict[_K, list[_T]]:
    """Group items by their key, such as rows by a column; groups come in the order of the items."""
    groups: dict[_K, list[_T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def own_command() -> str:
    """Return the command line of this program."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


def get_field(fields: Any, name: str, kind: Any) -> Any:
    """Get a field of a record that was read; refuse one that is missing, or of another type."""
    if not isinstance(fields, dict) or not isinstance(fields.get(name), kind):
        raise UserError(f"{name} is missing or wrong")
    return fields[name]


def read(path: Path) -> Record:
    """Read the record of a file.

    Raises:
        UserError: the file is not a record.
    """
    content = read_json(path)
    if not isinstance(content, dict) or content.keys() != {x.name for x in fields(Record)}:
        raise UserError(f"{path}: not a record of this version of fairseq-posenc")
    return Record(**content)
