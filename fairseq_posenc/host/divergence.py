"""Explains in one line that a training diverged, and at which update.

The hook for exceptions (:mod:`~fairseq_posenc.host.startup`) prints it, after fairseq has logged
the layers whose outputs are NaN or infinite.
"""

import re

from fairseq_posenc.errors import chain
from fairseq_posenc.host.log_guard import GUARD

_STOPPED = re.compile(r"training stopped at update ([\d,]+): ")


def explain_divergence(error: BaseException) -> str | None:
    """Explain a :class:`FloatingPointError` of fairseq's trainer; None for any other error."""
    divergence = next((link for link in chain(error) if isinstance(link, FloatingPointError)), None)
    model = GUARD.model() if GUARD.model else None
    if divergence is None or model is None or GUARD.settings is None:
        return None
    update = model.num_updates + 1
    return (
        f"training stopped at update {update:,}: {divergence}; the checkpoints "
        f"in {GUARD.settings.checkpoint.save_dir}, except crash.pt, are from before: continue from "
        "one of them with a smaller --lr, or with --clip-norm"
    )


def parse_stop_update(message: str) -> int:
    """Parse the update from a message of :func:`explain_divergence`; 0 for another message."""
    match = _STOPPED.search(message)
    return int(match[1].replace(",", "")) if match else 0
