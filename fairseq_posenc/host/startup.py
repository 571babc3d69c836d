"""Prepares a process of fairseq: safe loading, guards against lost runs, one-line error messages.

``models`` calls it when fairseq loads the plugin.
"""

import logging
import os
import sys
from functools import cache
from types import SimpleNamespace, TracebackType

import numpy as np
from hydra.core.hydra_config import HydraConfig

from fairseq_posenc.checkpoints.faults import find_message
from fairseq_posenc.checkpoints.safe_loading import allow_safe_classes
from fairseq_posenc.host.audit_hook import check_fairseq
from fairseq_posenc.host.explanations import explain_divergence, explain_failure
from fairseq_posenc.host.running_command import record_commands


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
    record_commands()
    hide_traces()
    install_excepthook()
    if HydraConfig.initialized():
        # By default hydra prints an error itself and ends the program, without calling the hook.
        os.environ.setdefault("HYDRA_FULL_ERROR", "1")


def hide_traces() -> None:
    """Hide the stack trace of an error in writing a checkpoint, which fairseq raises as well."""
    logging.getLogger("fairseq.checkpoint_utils").addFilter(
        lambda record: not record.getMessage().startswith("Traceback")
    )


def install_excepthook() -> None:
    """Make fairseq's commands print one line, not a stack trace, for a known error."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        message = find_message(error) or explain_divergence(error) or explain_failure(error)
        if message is None:
            previous(kind, error, trace)
        else:
            print(f"fairseq-posenc: error: {message}", file=sys.stderr)

    sys.excepthook = hook
