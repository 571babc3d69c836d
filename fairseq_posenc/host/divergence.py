"""Explains in one line that a training diverged, and at which update.

The hook for exceptions (:mod:`~fairseq_posenc.host.startup`) prints it, after fairseq has logged
the layers whose outputs are NaN or infinite.
"""

import re
import weakref
from typing import NamedTuple

from fairseq_posenc.checkpoints.state_dict_adapter import PositionCheckpoints
from fairseq_posenc.errors import chain


class _Training(NamedTuple):
    model: weakref.ref[PositionCheckpoints]
    save_dir: str


_training: _Training | None = None  # that runs in this process
_STOPPED = re.compile(r"training stopped at update ([\d,]+): ")


def watch(model: PositionCheckpoints, save_dir: str) -> None:
    """Remember the model that is trained, whose update the line names."""
    global _training
    _training = _Training(weakref.ref(model), save_dir)


def explain_divergence(error: BaseException) -> str | None:
    """Explain a :class:`FloatingPointError` of fairseq's trainer; None for any other error."""
    divergence = next((link for link in chain(error) if isinstance(link, FloatingPointError)), None)
    model = _training.model() if _training else None
    if divergence is None or model is None or _training is None:
        return None
    update = model.num_updates + 1
    return (
        f"training stopped at update {update:,}: {divergence}; the checkpoints "
        f"in {_training.save_dir}, except crash.pt, are from before: continue from "
        "one of them with a smaller --lr, or with --clip-norm"
    )


def parse_stop_update(message: str) -> int:
    """Parse the update from a message of :func:`explain_divergence`; 0 for another message."""
    match = _STOPPED.search(message)
    return int(match[1].replace(",", "")) if match else 0
