"""Prepares a process of fairseq: safe loading, guards against lost runs, one-line error messages.

``models`` calls it when fairseq loads the plugin. It also records the command that runs: fairseq
builds the model of a training and that of a checkpoint by the same call, to which it gives the
model's section of the configuration alone. Only to its logger a command gives the whole, before it
builds anything. So a filter keeps this object; it reads no message, and hides none that LOGLEVEL
asks for.
"""

import logging
import os
import sys
from functools import cache
from types import SimpleNamespace, TracebackType
from typing import NamedTuple

import numpy as np
from omegaconf import DictConfig

from fairseq_posenc.checkpoints.faults import find_message
from fairseq_posenc.checkpoints.safe_loading import allow_safe_classes
from fairseq_posenc.host.audit_hook import check_fairseq
from fairseq_posenc.host.explanations import explain_failure


class RunningCommand(NamedTuple):
    """A command of fairseq, and its configuration; changes of the configuration take effect."""

    name: str  # train, generate, interactive or eval_lm
    settings: DictConfig


class _SettingsRecorder(logging.Filter):
    """Keeps the configuration that a command logs; lets messages of LOGLEVEL through."""

    started: RunningCommand | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.msg, DictConfig):
            name = record.name.removeprefix("fairseq_cli.")
            self.started = RunningCommand(name, record.msg)
        return record.levelno >= logging.getLogger("fairseq_cli").getEffectiveLevel()


_RECORDER = _SettingsRecorder()


def take_command() -> RunningCommand | None:
    """Return the command that has started since the last call, if any.

    So it is prepared once, for the first model that it builds.
    """
    started, _RECORDER.started = _RECORDER.started, None
    return started


@cache
def prepare() -> None:
    """Prepare the commands of this process, once."""
    # numpy 1.24 dropped `float`, numpy 2 `compat`. fairseq 0.12 needs them for --sample-break-mode
    # eos (token_block_dataset) and in non-autoregressive translation (dynamic_crf_layer).
    for name, value in {"float": float, "compat": SimpleNamespace(long=int)}.items():
        if name not in vars(np):
            setattr(np, name, value)
    allow_safe_classes()
    sys.addaudithook(check_fairseq)
    for name in ("train", "generate", "interactive", "eval_lm"):
        logger = logging.getLogger(f"fairseq_cli.{name}")
        logger.setLevel(logging.INFO)  # fairseq logs its configuration at this level
        logger.addFilter(_RECORDER)
    # fairseq logs the trace of an error in writing a checkpoint, and raises the error as well.
    logging.getLogger("fairseq.checkpoint_utils").addFilter(
        lambda record: not record.getMessage().startswith("Traceback")
    )
    install_excepthook()
    # By default hydra prints an error itself and ends the program, without calling the hook.
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")


def install_excepthook() -> None:
    """Make fairseq's commands print one line, not a stack trace, for a known error."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        message = find_message(error) or explain_failure(error)
        if message is None:
            previous(kind, error, trace)
        else:
            print(f"fairseq-posenc: error: {message}", file=sys.stderr)

    sys.excepthook = hook
