"""Explains in one line that a training diverged, and at which update.

The hook for exceptions (:mod:`~fairseq_posenc.host.startup`) prints it, after fairseq has logged
the layers whose outputs are NaN or infinite.
"""

import re
import weakref

from fairseq_posenc.checkpoints.state_dict_adapter import PositionCheckpoints
from fairseq_posenc.errors import chain

# The model that this process trains, if it still lives, and the folder of its checkpoints.
_training: tuple[weakref.ref[PositionCheckpoints], str] | None = None
_STOPPED = re.compile(r"training stopped at update ([\d,]+): ")


def watch(model: PositionCheckpoints, save_dir: str) -> None:
    """Keep the model that is trained, whose update the line names."""
    global _training
    _training = weakref.ref(model), save_dir


def explain_divergence(error: BaseException) -> str | None:
    """Explain a :class:`FloatingPointError` of fairseq's trainer; None for any other error."""
    divergence = next((link for link in chain(error) if isinstance(link, FloatingPointError)), None)
    if divergence is None or _training is None or (model := _training[0]()) is None:
        return None
    update = model.num_updates + 1
    return (
        f"training stopped at update {update:,}: {divergence}; the checkpoints "
        f"in {_training[1]}, except crash.pt, are from before: continue from "
        "one of them with a smaller --lr, or with --clip-norm"
    )


def parse_stop_update(message: str) -> int:
    """Parse the update from a message of :func:`explain_divergence`; 0 for another message."""
    match = _STOPPED.search(message)
    return int(match[1].replace(",", "")) if match else 0
