"""Options of fairseq-train that need what is no longer there."""

from __future__ import annotations

from typing import Any

from fairseq_posenc.errors import UserError

NO_PLASMA = (
    "--use-plasma-view needs pyarrow.plasma, which pyarrow has dropped (12.0): leave it out; the "
    "data are mapped into memory anyway"
)


def check_packages(settings: Any) -> None:
    """Refuse an option that would end in an error, or in a training without checkpoints.

    Raises:
        UserError: says why.
    """
    if settings.common.use_plasma_view or getattr(settings.task, "use_plasma_view", False):
        raise UserError(NO_PLASMA)
    if settings.checkpoint.write_checkpoints_asynchronously:
        raise UserError(
            "--write-checkpoints-asynchronously writes no checkpoint_last.pt, which is needed to "
            "resume, and nothing at all without iopath: leave it out"
        )
