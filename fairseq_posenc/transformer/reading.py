"""Checkpoints read without running code, and told in one line where they cannot be.

torch reads only tensors and plain settings from a checkpoint (``weights_only``), and fairseq writes
``argparse.Namespace`` into it. Allowing that one class makes every command work while a file that
would run code is still refused.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from fairseq_posenc.errors import UserError, damage


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Tell in one line why a checkpoint cannot be read.

    Args:
        what: the file, as a user knows it: ``--checkpoint PATH``.

    Raises:
        UserError: whatever went wrong; what torch and fairseq raise depends on what the file holds.
    """
    try:
        yield
    except Exception as error:
        raise UserError(f"{what}: {damage(error)}") from error


def allow_safe_classes() -> None:
    """Let torch load what fairseq's files hold beside tensors and settings.

    That is ``argparse.Namespace``, and numpy's numbers, which scikit-learn's metrics are.
    """
    if hasattr(torch.serialization, "add_safe_globals"):  # torch >= 2.4
        scalar: Any = np.float64(0).__reduce__()[0]  # its module has another name in numpy 1
        number = type(np.dtype(np.float64))
        torch.serialization.add_safe_globals([argparse.Namespace, scalar, np.dtype, number])
