"""A line on the tensors that a model loads from a checkpoint."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fairseq_posenc.checkpoints.identity import KEY
from fairseq_posenc.checkpoints.weights import storage_address


def format_load_report(
    before: dict[str, Any], state_dict: dict[str, Any], own: dict[str, Tensor]
) -> str:
    """Count the tensors that are loaded, new in the model, and left in the checkpoint.

    fairseq and our adapter rename, split, drop and add tensors; storages show which were loaded.

    Args:
        before: of the checkpoint, as it was read.
        state_dict: of the checkpoint, as it is about to be loaded.
        own: the model's.
    """
    given = {name: x for name, x in state_dict.items() if isinstance(x, Tensor)}
    names = [name for name in own if not name.endswith(KEY)]
    new = [
        x for x in names if x not in given or storage_address(given[x]) == storage_address(own[x])
    ]
    loaded = set(names) - set(new)
    used = {storage_address(given[name]) for name in loaded}
    ignored = [
        name
        for name, x in before.items()
        if isinstance(x, Tensor) and not name.endswith(KEY)
        if name not in loaded and storage_address(x) not in used
    ]
    return f"{len(loaded):,} tensors loaded, {_format(new)} new, {_format(ignored)} ignored"


def _format(names: list[str]) -> str:
    """Format their number, with the first of them."""
    more = ", ..." if len(names) > 1 else ""
    return f"{len(names):,} ({names[0]}{more})" if names else "0"
