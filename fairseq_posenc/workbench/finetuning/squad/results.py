"""Prints and writes results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Optional

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.finetuning.squad.data import V2, Squad
from fairseq_posenc.workbench.finetuning.squad.score import Figures
from fairseq_posenc.workbench.results.record import Record, own_command
from fairseq_posenc.workbench.running.progress import say


def print_figures(squad: Squad, figures: Figures) -> None:
    """Print the figures as the official script of the version does."""
    print(json.dumps(figures, indent=2 if squad.version == V2 else None))


def build_record(
    squad: Squad,
    figures: Figures,
    name: str,
    checkpoint: Optional[Path],
    position_encoding: Optional[str],
) -> Record:
    """Build the record of the figures, by the names of SQuAD 2.0."""
    names = {"exact_match": "exact"}
    row = {names.get(key, key): value for key, value in figures.items()}
    data = {
        "name": name,
        "checkpoint": None if checkpoint is None else str(checkpoint),
        "questions": str(squad.path),
        "squad": squad.version,
    }
    rows = [{**row, "total": len(squad.questions)}]
    return Record("squad", {"scores": rows}, data, spec=position_encoding, command=own_command())


def write_json(path: Path, content: Any) -> None:
    """Write a record, or other content as JSON, and print the path.

    Raises:
        UserError: it cannot be written.
    """
    try:
        with open(path, "w", encoding="utf-8") as file:
            is_record = isinstance(content, Record)
            file.write(content.text() if is_record else json.dumps(content, ensure_ascii=False))
            file.write("\n")
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from None
    say(f"wrote {path}")
