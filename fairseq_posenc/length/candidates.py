"""Which checkpoints are compared, as the user names them: ``NAME=CHECKPOINT[@SPEC]``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Optional

from fairseq_posenc.errors import UserError
from fairseq_posenc.registry import Spec, parse

FORM = "NAME=CHECKPOINT or NAME=CHECKPOINT@SPEC"


class Candidate(NamedTuple):
    """A model to be read from a file.

    Attributes:
        name: what the user calls it.
        path: its checkpoint.
        override: position encodings to read it with, in place of those that it was trained with.
    """

    name: str
    path: Path
    override: Optional[Spec] = None


def parse_candidates(texts: Sequence[str]) -> list[Candidate]:
    """Return the models of the command line.

    Raises:
        UserError: malformed, two of the same name, a file that does not exist, or a bad spec.
    """
    candidates: list[Candidate] = []
    for text in texts:
        candidate = _parse_one(text)
        if candidate.name in [other.name for other in candidates]:
            raise UserError(f"two models are called {candidate.name!r}: give each its own name")
        candidates.append(candidate)
    return candidates


def _parse_one(text: str) -> Candidate:
    # The name may be a spec itself, as in 'm4(max_distance=64)=model.pt'.
    parts = [part.strip() for part in re.split(r"=(?![^(]*\))", text, maxsplit=1)]
    if len(parts) < 2 or not all(parts):
        raise UserError(f"cannot read {text!r}: write {FORM}")
    name, value = parts
    if "/" in name or name in (".", ".."):
        raise UserError(f"cannot read {text!r}: the name must be one that a folder can have")
    path, at, spec = value.rpartition("@")
    if not at or Path(value).exists():
        path, spec = value, ""
    if not Path(path).is_file():
        raise UserError(f"{name}: the checkpoint {path} does not exist")
    return Candidate(name, Path(path), parse(spec) if at and spec else None)
