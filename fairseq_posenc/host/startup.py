"""Prepares a process of fairseq that loads the plugin: safe loading, one-line error messages."""

import atexit
import logging
import os
import sys
import threading
import traceback
import warnings
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from fairseq.data.iterators import BackgroundConsumer

from fairseq_posenc.checkpoints import safe_loading
from fairseq_posenc.checkpoints.faults import find_message
from fairseq_posenc.errors import UserError, shortened
from fairseq_posenc.host.explanations import explain_failure

# The packages of fairseq's commands and of ours: their code is in the stack of all their errors.
_OF_COMMANDS = {"fairseq_cli", "fairseq_posenc.workbench.running"}
# Warnings of hydra and torch about fairseq's code, at each start.
_REMARKS = (
    r"(?s).*(hydra\.experimental|version_base|@package _group_|strict flag|ConfigStore schema|"
    r"torch\.cuda\.amp\.autocast|'pin_memory' argument)"
)


@cache
def prepare() -> None:
    """Prepare this process for fairseq, once; what other code would notice, only in a command."""
    # numpy 1.24 dropped `float`, numpy 2 `compat`. fairseq 0.12 needs them for --sample-break-mode
    # eos (token_block_dataset) and in non-autoregressive translation (dynamic_crf_layer).
    vars(np).setdefault("float", float)
    vars(np).setdefault("compat", SimpleNamespace(long=int))
    safe_loading.allow_safe_classes()
    sys.addaudithook(check_fairseq)
    # fairseq logs some errors, in hundreds of lines or words, that it also raises.
    repeated = ("Traceback", "Error when composing")
    for name in ("fairseq.checkpoint_utils", "fairseq.dataclass.utils"):
        logging.getLogger(name).addFilter(lambda entry: not entry.getMessage().startswith(repeated))
    atexit.register(end_loading)  # training may end within an epoch
    if _OF_COMMANDS.isdisjoint(sys.modules):
        return  # a program of the user's
    warnings.filterwarnings("ignore", _REMARKS, module=r"sys$|hydra\.|fairseq|torch\.utils\.data\.")
    sys.excepthook = partial(report, sys.excepthook)
    # By default hydra prints an error itself and ends the program, without calling the hook.
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")


def report(previous: Any, kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Print one line, not a stack trace, for a command's known error; ``previous`` shows others."""
    packages = {frame.f_globals.get("__package__") for frame, _ in traceback.walk_tb(trace)}
    if packages & _OF_COMMANDS and (message := find_message(error) or explain_failure(error)):
        print(f"fairseq-posenc: error: {message}", file=sys.stderr)
    else:
        previous(kind, error, trace)


def end_loading() -> None:
    """End the threads that load batches ahead: Python's exit would abort one inside torch."""
    for thread in threading.enumerate():
        if isinstance(thread, BackgroundConsumer):
            thread._max_len = 0  # the batch that it loads is its last
            with thread._queue.mutex:
                thread._queue.maxsize = sys.maxsize  # it waits for no reader
                thread._queue.not_full.notify()
            thread.join(10)  # seconds


def check_fairseq(event: str, arguments: tuple[Any, ...]) -> None:
    """Refuse to run a setting as code, and to open a checkpoint that is damaged or runs code.

    Python calls this audit hook, for the rest of the process, before it compiles or opens anything;
    an exception cancels that. So fairseq is not patched, and no path through its code is missed.
    Of the ``arguments``, the first is the source for ``compile``, the path for ``open``.
    """
    if event not in ("compile", "open"):
        return
    caller = sys._getframe().f_back  # the code that triggered the event; None: Python itself
    if not caller or not str(caller.f_globals.get("__name__")).startswith("fairseq."):
        return
    if event == "compile":
        source = arguments[0]  # `eval` encodes a str as UTF-8; no setting is of bytes
        text = source.decode("utf-8", "replace") if type(source) is bytes else source
        if type(text) is not str or not safe_loading.is_literal(text):
            raise UserError(
                "a setting that fairseq evaluates is not a literal (numbers, text, lists of them),"
                f" and would be run as code: {shortened(' '.join(str(text).split()))!r}"
            )
    elif caller.f_code.co_name == "load_checkpoint_to_cpu":  # opens all of fairseq's checkpoints
        path = os.fsdecode(arguments[0])
        if os.path.isfile(path) or os.path.isdir(path):  # not a pipe
            with safe_loading.open_checkpoint(Path(path)) as state:  # checks its settings
                safe_loading.refuse_incomplete(state)
