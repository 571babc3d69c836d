"""Which of several runs is the best on the validation set."""

from __future__ import annotations

from pathlib import Path

from fairseq_posenc.checkpoints.safe_loading import allow_safe_classes, open_mapped, readable_errors
from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.running.logs import bits_to_nats


def best_losses(folder: Path) -> dict[Path, float]:
    """Read the validation loss of each run's best checkpoint, in bits, the lowest first.

    Raises:
        UserError: there is no checkpoint, or one that is not whole.
    """
    allow_safe_classes()
    losses = {}
    for path in sorted(folder.glob("*/checkpoint_best.pt")):
        with readable_errors(str(path)):
            losses[path] = float(open_mapped(path)["extra_state"]["val_loss"])
    if not losses:
        raise UserError(f"{folder}: no folder in it has a checkpoint_best.pt; train first")
    return dict(sorted(losses.items(), key=lambda item: item[1]))


def tell_best(folder: Path) -> None:
    """Print the runs of a folder, the best first."""
    for number, (checkpoint, loss) in enumerate(best_losses(folder).items()):
        mark = "    " if number else "best"
        print(
            f"{mark}  validation loss {loss:.4f} bits, {bits_to_nats(loss):.4f} nats  {checkpoint}"
        )
