"""Tables by position made longer."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

Rule = Literal["copy", "interpolate"]
RULES: dict[str, str] = {
    "copy": "repeats the table from its first row",
    "interpolate": "stretches it, so that the positions between come from their neighbours",
}


def lengthened(table: Tensor, before: int, rows: int, rule: Rule) -> Tensor:
    """Return a table ``(rows, C)``.

    Args:
        table: ``(n, C)``.
        before: how many of its rows belong to no position, and stay.
        rows: of the longer one.
        rule: how.
    """
    own, wanted = table[before:], rows - before
    if rule == "copy":
        longer = own[torch.arange(wanted) % own.size(0)]
    else:
        stretched = F.interpolate(
            own.float().t()[None], size=wanted, mode="linear", align_corners=True
        )  # [1, C, wanted]
        longer = stretched[0].t().to(own.dtype)
    return torch.cat([table[:before], longer])
