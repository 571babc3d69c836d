#!/usr/bin/env python3
"""Say which of several runs has the lowest loss on the validation set.

python train_scripts/best_seed.py checkpoints/translation_iwslt17/rope
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from fairseq_posenc.errors import UserError
from fairseq_posenc.running.logs import in_nats
from fairseq_posenc.transformer.commands import prepare


def best_losses(folder: Path) -> dict[Path, float]:
    """Return the validation loss of each run's best checkpoint, the lowest first.

    Args:
        folder: folder with a folder for each run.

    Raises:
        UserError: there is no checkpoint.
    """
    losses = {}
    for path in sorted(folder.glob("*/checkpoint_best.pt")):
        state = torch.load(path, map_location="cpu", mmap=True)
        losses[path] = float(state["extra_state"]["val_loss"])
    if not losses:
        raise UserError(f"{folder}: no folder in it has a checkpoint_best.pt; train first")
    return dict(sorted(losses.items(), key=lambda item: item[1]))


if __name__ == "__main__":
    prepare()  # allows what fairseq's checkpoints hold
    for number, (checkpoint, loss) in enumerate(best_losses(Path(sys.argv[1])).items()):
        mark = "best" if number == 0 else "    "
        print(f"{mark}  validation loss {loss:.4f} bits, {in_nats(loss):.4f} nats  {checkpoint}")
