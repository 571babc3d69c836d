"""Stand-ins for the positions that were removed from a model, whose code still calls them.

They refuse calls outside of a forward pass that the stack has prepared: a part of a model that is
called by itself would compute without positions, which nobody would notice.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_posenc.errors import UserError

CALLED_BY_ITSELF = "a part of a model was called by itself: call the model as a whole"
# After the name of a model or an attention:
OWN_CODE = "computes attention by code of its own, which takes no other positions than rotations"
# Attribute of other attention in a model with positions, such as that to an encoder's output.
WITHOUT_POSITIONS = "attends_without_positions"

_pass = threading.local()  # has `cosines` in a pass; torch.compile traces no `ContextVar`


@contextmanager
def begin_pass(cosines: tuple[Any, Any]) -> Iterator[None]:
    """Let the stand-ins work inside; give them cosines and sines, or two Nones."""
    before = getattr(_pass, "cosines", None)
    _pass.cosines = cosines
    try:
        yield
    finally:
        _pass.cosines = before


def _read_cosines() -> tuple[Any, Any]:
    """Read the cosines and sines of the pass; refuse a call outside of one."""
    if (cosines := getattr(_pass, "cosines", None)) is None:
        raise UserError(CALLED_BY_ITSELF)
    return cosines


class NoRotation(nn.Module):
    """Replaces a rotary module: attention has the cosines of its layer, other code gets these."""

    def forward(self, *args: Any, **named: Any) -> Any:
        """Return the cosines and sines that all layers share; None, None if layers differ."""
        return _read_cosines()


class NoPositions(nn.Module):
    """Replaces a table of positions by zero."""

    def forward(self, *args: Any, **named: Any) -> Tensor:
        """Return a scalar zero, which can be added to vectors of any dtype and device."""
        _read_cosines()  # refuses a call outside of a pass
        return torch.zeros(())


class NoBias(nn.Module):
    """Replaces a table of distances by zeros; the attention that calls it has checked the pass."""

    # It is not a parameter, but transformers initializes a tensor of this name on loading.
    weight = torch.empty(0)

    def forward(self, buckets: Tensor) -> Tensor:
        """Return a zero for all heads and distances, ``(1, 1, 1)``, which our attention ignores."""
        return torch.zeros(1, 1, 1, device=buckets.device)
