"""Which checkpoints are compared, as the user names them: ``NAME=CHECKPOINT[@SPEC]``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Optional

from fairseq_posenc.errors import UserError
from fairseq_posenc.registry import Spec, parse
from fairseq_posenc.workbench.running.options import is_folder_name, parse_named

FORM = "NAME=CHECKPOINT or NAME=CHECKPOINT@SPEC"


class Variant(NamedTuple):
    """A model to be read from a file.

    Attributes:
        name: what the user calls it.
        path: its checkpoint.
        override: position encodings to read it with, in place of those that it was trained with.
    """

    name: str
    path: Path
    override: Optional[Spec] = None


def parse_variants(texts: Sequence[str]) -> list[Variant]:
    """Parse the models of the command line.

    Raises:
        UserError: malformed, two of the same name, a file that does not exist, or a bad spec.
    """
    return [_parse_variant(*each) for each in parse_named(texts, FORM, "models").items()]


def _parse_variant(name: str, value: str) -> Variant:
    if not is_folder_name(name):
        raise UserError(f"{name!r}: the name must be one that a folder can have")
    path, at, spec = value.rpartition("@")
    if not at or Path(value).exists():
        path, spec = value, ""
    if not Path(path).is_file():
        raise UserError(f"{name}: the checkpoint {path} does not exist")
    return Variant(name, Path(path), parse(spec) if at and spec else None)
