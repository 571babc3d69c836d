"""The record of a job: the figures, what they are of, and the command that made them.

Every job writes one, and ``fairseq-posenc report`` shows it, whatever the job.
"""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

from fairseq_posenc.errors import UserError, shortened
from fairseq_posenc.files import write_whole
from fairseq_posenc.workbench.running.files import refuse_link

VERSION = 1  # version of the format
_HEAD = 4096  # characters of a file in which its kind has to be named
Row = Mapping[str, Any]  # texts and numbers by column, None where there is no figure


class RecordError(ValueError):
    """A file is not a record, or one of another version; the message says which."""


class Record(NamedTuple):
    """What came out of a job."""

    kind: str  # the job, as in `compare`
    # tables by name; each has rows, and a row has values by column. The first table holds what
    # the job is about
    figures: Mapping[str, Sequence[Row]]
    data: Row  # what the figures are of: the text or its folder, a checkpoint, the machine, by name
    # the position encodings, where they are the same in all rows; None if not known
    spec: Optional[str] = None
    seed: Optional[int] = None  # the seed, where it is the same in all rows
    command: str = ""  # the line that made it
    version: int = VERSION  # version of the format

    @property
    def rows(self) -> Sequence[Row]:
        """The rows of the first table."""
        return next(iter(self.figures.values()), ())

    def text(self) -> str:
        """Format the record as JSON, a line for each row."""
        head = {name: value for name, value in self._asdict().items() if name != "figures"}
        lines = [f" {json.dumps(name)}: {_json(value)}" for name, value in head.items()]
        tables = []
        for name, rows in self.figures.items():
            body = ",\n".join(f"   {_json(row)}" for row in rows)
            tables.append(f"  {json.dumps(name)}: [\n{body}\n  ]")
        lines.append(' "figures": {\n' + ",\n".join(tables) + "\n }")
        return "{\n" + ",\n".join(lines) + "\n}"

    def write(self, path: Path) -> None:
        """Write the record into a file."""
        write_whole(path, self.text() + "\n")


def own_command() -> str:
    """Build the line that started this program."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


def read(path: Path) -> Record:
    """Read the record of a file.

    Raises:
        RecordError: it is none, or one of another version.
    """
    try:
        with open(path, encoding="utf-8") as stream:
            text = stream.read(_HEAD)
            if '"kind"' not in text:
                raise RecordError("no record of fairseq-posenc")
            content = json.loads(text + stream.read())
            json.dumps(content, ensure_ascii=False).encode()  # half of a surrogate pair is not text
    except RecordError:
        raise
    except (ValueError, RecursionError) as error:
        raise RecordError(f"not a whole file of JSON ({shortened(str(error))})") from None
    except OSError as error:
        raise RecordError(f"cannot be read ({error.strerror})") from None
    return _check_content(content)


def make_folder(out: Path) -> None:
    """Make the folder of a job's results.

    Raises:
        UserError: it cannot be made, or is a link.
    """
    refuse_link(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out}: {error.strerror}; name another folder") from None


def _check_content(content: Any) -> Record:
    if not isinstance(content, dict) or not {"kind", "version", "figures"} <= content.keys():
        raise RecordError("no record of fairseq-posenc")
    if content["version"] != VERSION:
        version = shortened(str(content["version"]))
        raise RecordError(f"a record of version {version}, which this one ({VERSION}) cannot read")
    record = Record(**{"data": {}, **{k: v for k, v in content.items() if k in Record._fields}})
    forms = {
        "kind": isinstance(record.kind, str),
        "command": isinstance(record.command, str),
        "spec": isinstance(record.spec, (str, type(None))),
        "seed": isinstance(record.seed, (int, type(None))) and _is_value(record.seed),
        "data": _is_row(record.data),
        "figures": _are_tables(record.figures),
    }
    for name, is_right in forms.items():
        if not is_right:
            raise RecordError(f"a record whose {name} is not as it should be")
    return record


def _are_tables(figures: object) -> bool:
    return isinstance(figures, dict) and all(
        isinstance(table, list) and all(map(_is_row, table)) for table in figures.values()
    )


def _is_row(row: object) -> bool:
    return isinstance(row, dict) and all(map(_is_value, row.values()))


def _is_value(value: object) -> bool:
    if isinstance(value, int):  # JSON allows any number of digits
        return abs(value) < 2**63
    return isinstance(value, (str, float, type(None)))


def _json(value: Any) -> str:
    """Format JSON without NaN and infinite values."""
    if isinstance(value, Mapping):
        value = {key: item if _is_finite(item) else None for key, item in value.items()}
    return json.dumps(value, ensure_ascii=False)


def _is_finite(value: object) -> bool:
    return not isinstance(value, float) or math.isfinite(value)
