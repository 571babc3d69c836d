"""Stand-ins for the positions that were taken away from a model: its own code calls them.

They work only within a forward pass that the stack has prepared. A part of a model that is called
by itself would otherwise compute without positions, which nobody would notice.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from fairseq_posenc.errors import UserError

CALLED_BY_ITSELF = (
    "a part of a model was called by itself: positions are computed once for all layers, when the "
    "model is called"
)
Cosines = tuple[Tensor, Tensor]  # cosines and sines, each `(B or 1, T, width)`


class _Pass(threading.local):
    """What this thread knows of the forward pass that it is in.

    Attributes:
        cosines: by kind of layer (see :mod:`fairseq_posenc.hf.attention`); None outside a pass.
    """

    cosines: list[Cosines] | None = None


_pass = _Pass()  # not a `ContextVar`, which `torch.compile` cannot trace


@contextmanager
def begin_pass(cosines: list[Cosines]) -> Iterator[None]:
    """Let the stand-ins work inside."""
    before = _pass.cosines
    _pass.cosines = cosines
    try:
        yield
    finally:
        _pass.cosines = before


def _read_cosines() -> list[Cosines]:
    """Return the cosines of the current pass; refuse parts that are called outside of one."""
    if _pass.cosines is None:
        raise UserError(CALLED_BY_ITSELF)
    return _pass.cosines


class NoRotation(nn.Module):
    """Replaces a model's rotary module: gives the cosines that the stack computed."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, *args: Any, **named: Any) -> "Cosines | UnknownCosines":
        """Return the cosines and sines of all layers, each ``(B or 1, T, width)``."""
        cosines = _read_cosines()
        return cosines[0] if len(cosines) == 1 else UnknownCosines()


class UnknownCosines:
    """Stands for cosines where those of layers differ: each layer replaces it by its own."""

    def __iter__(self) -> NoReturn:
        raise UserError("the layers of this model rotate in different ways: read those of a layer")


class NoPositions(nn.Module):
    """Replaces a table of positions by zero."""

    def forward(self, *args: Any, **named: Any) -> Tensor:
        """Return a scalar zero, which can be added to vectors of any dtype and device."""
        _read_cosines()
        return torch.zeros(())


class NoBias(nn.Module):
    """Replaces a table of distances by zeros.

    It checks no pass, as the others do: the attention that calls it has checked this.
    """

    def __init__(self) -> None:
        super().__init__()
        # It is not a parameter, but transformers initializes a tensor of this name on loading.
        self.weight = torch.empty(0)

    def forward(self, buckets: Tensor) -> Tensor:
        """Return a zero for all heads and distances, ``(1, 1, 1)``, whatever the buckets are."""
        return torch.zeros(1, 1, 1, device=buckets.device)
