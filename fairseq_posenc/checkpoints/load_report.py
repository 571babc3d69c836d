"""What a model takes of a checkpoint, told in a line."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fairseq_posenc.checkpoints.identity import KEY
from fairseq_posenc.checkpoints.weights import place


def format_load_report(
    before: dict[str, Any], state_dict: dict[str, Any], own: dict[str, Tensor]
) -> str:
    """Return how many tensors are loaded, are new in the model, and are left in the checkpoint.

    fairseq and what matches positions rename, split, drop and fill in; what became of a tensor is
    told by its storage.

    Args:
        before: of the checkpoint, as it was read.
        state_dict: of the checkpoint, as it is about to be loaded.
        own: the model's.
    """
    given = {name: x for name, x in state_dict.items() if isinstance(x, Tensor)}
    names = [name for name in own if not name.endswith(KEY)]
    new = [x for x in names if x not in given or place(given[x]) == place(own[x])]
    loaded = set(names) - set(new)
    used = {place(given[name]) for name in loaded}
    ignored = [
        name
        for name, x in before.items()
        if isinstance(x, Tensor) and not name.endswith(KEY)
        if name not in loaded and place(x) not in used
    ]
    return f"{len(loaded):,} tensors loaded, {_told(new)} new, {_told(ignored)} ignored"


def _told(names: list[str]) -> str:
    """Return how many, with the first of them."""
    more = ", ..." if len(names) > 1 else ""
    return f"{len(names):,} ({names[0]}{more})" if names else "0"
