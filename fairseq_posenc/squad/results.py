"""What the commands print and write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Optional

from fairseq_posenc.errors import UserError
from fairseq_posenc.running.progress import say
from fairseq_posenc.squad.data import V2, Squad
from fairseq_posenc.squad.score import Figures


def print_figures(squad: Squad, figures: Figures) -> None:
    """Print the figures as the official script of the version does."""
    print(json.dumps(figures, indent=2 if squad.version == V2 else None))


def record(
    squad: Squad,
    figures: Figures,
    name: str,
    checkpoint: Optional[Path],
    position_encoding: Optional[str],
) -> dict[str, Any]:
    """Return the figures as ``fairseq-posenc report`` reads them."""
    names = {"exact_match": "exact"}
    return {
        "kind": "squad",
        "name": name,
        "checkpoint": None if checkpoint is None else str(checkpoint),
        "position_encoding": position_encoding,
        "version": squad.version,
        "total": len(squad.questions),
        **{names.get(key, key): value for key, value in figures.items()},
    }


def write(path: Path, content: Any) -> None:
    """Write a JSON file, and say so.

    Raises:
        UserError: it cannot be written.
    """
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(content, file, ensure_ascii=False)
            file.write("\n")
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from None
    say(f"wrote {path}")
