"""Checks, by an audit hook, what fairseq evaluates, and each checkpoint that it opens.

Python calls audit hooks before it compiles or opens anything; an exception in a hook cancels the
operation. So fairseq is not patched, and no path through its code is missed. The hook stays for the
rest of the process; ``host/startup.py`` adds it when fairseq loads the plugin.
"""

import os
import sys
from pathlib import Path
from typing import Any

from fairseq_posenc.checkpoints.safe_loading import open_checkpoint, refuse_incomplete
from fairseq_posenc.checkpoints.trusted_settings import is_literal
from fairseq_posenc.errors import UserError, shortened


def check_fairseq(event: str, arguments: tuple[Any, ...]) -> None:
    """Refuse to run a setting as code, or to open a checkpoint that would, or is damaged.

    Args:
        event: Python's name of what is about to happen.
        arguments: first the source for ``compile``; the path for ``open``.
    """
    if event not in ("compile", "open"):
        return
    caller = sys._getframe(1)  # an audit hook's caller is the code that triggered the event
    if not str(caller.f_globals.get("__name__")).startswith("fairseq."):
        return
    if event == "compile":
        _refuse_source(arguments[0])
    elif caller.f_code.co_name == "load_checkpoint_to_cpu":  # opens all of fairseq's checkpoints
        path = os.fsdecode(arguments[0])
        if os.path.isfile(path) or os.path.isdir(path):  # not a pipe
            with open_checkpoint(Path(path)) as state:  # checks its settings
                refuse_incomplete(state)


def _refuse_source(source: Any) -> None:
    """Refuse the source that Python is about to compile unless it is a literal.

    Python passes the text of ``eval`` as UTF-8 bytes; :func:`is_literal` refuses texts that declare
    another encoding.
    """
    text = source.decode("utf-8", "replace") if type(source) is bytes else source
    if type(text) is not str or not is_literal(text):
        quoted = shortened(" ".join(str(text).split()))
        raise UserError(
            "a setting that fairseq evaluates is not a literal (numbers, words, lists of them), "
            f"and would be run as code: {quoted!r}"
        )
