"""Errors that a user can mend, told in one line."""

from __future__ import annotations

import errno
import pickle
import re

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_RANK = re.compile(r"^fairseq_posenc\.errors\.UserError: (.+)$", re.MULTILINE)


class UserError(ValueError):
    """Wrong input: the message says what is wrong, where, and what to do."""


def one_line(error: BaseException | None) -> str | None:
    """Return the message for a user's mistake anywhere in an exception's chain, else None.

    fairseq wraps what goes wrong while a checkpoint is loaded in a general exception, so the cause
    has to be looked for along the chain.
    """
    while error is not None:
        if isinstance(error, UserError):
            return str(error)
        if isinstance(error, pickle.UnpicklingError) and "Weights only load failed" in str(error):
            reason = str(error.__context__ or error).strip().splitlines()[0]  # what torch met
            return (
                f"checkpoint refused, because loading it could run code: {reason} "
                "Only tensors and plain settings are loaded; use a file from a source you trust."
            )
        if isinstance(error, OSError) and error.errno in DISK_FULL:
            return (
                f"{error.filename or 'a file'} could not be written ({error.strerror}); the "
                "checkpoints written before are whole. Make room and start the same command again "
                "to go on from the last one."
            )
        told_by_rank = _RANK.search(str(error)) if "Process" in type(error).__name__ else None
        if told_by_rank:  # torch hands on an error of another process as text
            return told_by_rank[1]
        error = error.__cause__ or error.__context__
    return None
