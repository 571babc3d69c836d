"""An audit hook that checks every text fairseq compiles, and every checkpoint it opens.

Python calls audit hooks before either, for every command, model and task, and stops where a hook
raises. So nothing of fairseq is patched, and no path through it is forgotten.
"""

import sys
from pathlib import Path
from typing import Any

from fairseq_posenc.checkpoints.safe_loading import open_mapped, readable_errors
from fairseq_posenc.checkpoints.trusted_settings import is_literal, refuse_files
from fairseq_posenc.errors import UserError, shortened

_READER = "load_checkpoint_to_cpu"  # opens the checkpoints of all of fairseq's commands
_installed: list[bool] = []


def audit_fairseq() -> None:
    """Keep fairseq from running a setting as code, and from reading a checkpoint unchecked."""
    if not _installed:
        _installed.append(True)
        sys.addaudithook(_check_event)


def _check_event(event: str, given: tuple[Any, ...]) -> None:
    """Check the event if fairseq causes it."""
    if event not in ("compile", "open"):
        return
    caller = sys._getframe(1)
    if not str(caller.f_globals.get("__name__")).startswith("fairseq."):
        return
    if event == "compile":
        _refuse_code(given[0])
    elif caller.f_code.co_name == _READER:
        refuse_broken(Path(str(given[0])))


def _refuse_code(source: Any) -> None:
    text = source.decode("utf-8", "replace") if isinstance(source, bytes) else str(source)
    if not is_literal(text):
        raise UserError(
            "a setting that fairseq evaluates is not a literal (numbers, words, lists of them), "
            f"and would be run as code: {shortened(' '.join(text.split()))!r}"
        )


def refuse_broken(path: Path) -> None:
    """Refuse a checkpoint that is damaged, would run code, or names files to open.

    Nothing of it stays in memory, and of its tensors nothing is read.
    """
    if path.is_file():
        with readable_errors(str(path)):
            refuse_files(open_mapped(path))
