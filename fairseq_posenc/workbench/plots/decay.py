"""The bound by which rotary scores decay with the distance."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fairseq_posenc.encodings.rotation import PairRotation
from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.plots import grids
from fairseq_posenc.workbench.plots.stacks import Stack, tokens


@torch.no_grad()
def bound(turn: Tensor) -> Tensor:
    """Return the mean of abs(S_1) .. abs(S_(d/2)), where S_j is the sum of the first j turns.

    A rotary score of whatever query and key is at most this times d/2 times the largest change from
    one pair of coordinates to the next (Su et al. 2021, "RoFormer", arXiv:2104.09864, 3.4.3).

    Args:
        turn: e^(i m theta_t) of each distance and pair, ``(..., d/2)``.

    Returns:
        ``(...)``; d/4 + 1/2 at distance 0.
    """
    return turn.to(torch.complex128).cumsum(-1).abs().mean(-1)


def draw_decay(stack: Stack, reach: int, title: str) -> Any:
    """Return a Figure of the bound at distances 0 to ``reach``.

    Raises:
        UserError: nothing is rotated.
    """
    rotation = stack.layers[0].shared.rotation(tokens(reach + 1).ids)
    if not isinstance(rotation, PairRotation) or rotation.decay is not None:
        raise UserError(f"{stack.spec} is not rope, whose scores the bound is of")
    figure, (axes,) = grids.new(1, title, columns=1, ratio=0.75)
    names = [f"{2 * rotation.phases.size(-1)} coordinates of a head"]
    grids.lines(axes, grids.distances(0, reach), bound(rotation.phases[0]), names)
    grids.label(axes, "bound of the score", "distance", "mean of |S_j|")
    return figure
