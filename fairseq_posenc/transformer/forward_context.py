"""How what a forward pass knows of its positions reaches layers that fairseq calls without it.

A stack has it carried, by its thread, to a hook before each of its layers, and the hook hands it to
the layer as arguments: as such it is there again when a layer under activation checkpointing runs a
second time, in the backward pass. Nothing is kept on modules: threads do not meet, a layer holds no
model, and nothing of a forward pass survives it. A thread's variable, as ``torch.compile`` does not
follow a :class:`~contextvars.ContextVar`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from fairseq_posenc.assembly import Shared
from fairseq_posenc.encodings.terms import TERMS
from fairseq_posenc.errors import UserError


class _Carrier(threading.local):
    def __init__(self) -> None:
        self.shared: Shared | None = None


_carrier = _Carrier()


def current_context() -> Shared | None:
    """Return what the forward pass that this is a part of knows of its positions."""
    return _carrier.shared


@contextmanager
def set_context(shared: Shared | None) -> Iterator[None]:
    """Let the modules that are called inside know of the positions."""
    before = _carrier.shared
    _carrier.shared = shared
    try:
        yield
    finally:
        _carrier.shared = before


def inject_context(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Add what is carried to the arguments of a layer: a forward pre-hook.

    Terms come one by one, as ``shared_NAME``: tensors inside a tuple would lose their gradients
    under activation checkpointing.
    """
    shared = _carrier.shared
    if shared is None:
        raise UserError("the layers were called past their stack's forward: no positions known")
    tensors = {f"shared_{name}": tensor for name, _, tensor in shared.terms.given()}
    bare = shared.terms._replace(**dict.fromkeys(TERMS))  # type: ignore[arg-type]
    return args, {**kwargs, "shared": shared._replace(terms=bare), **tensors}


def collect_context(shared: Shared | None, kwargs: dict[str, Any]) -> Shared | None:
    """Return what a layer was handed over, and take its terms out of the other arguments."""
    if shared is None:
        return None
    tensors = {name: kwargs.pop(f"shared_{name}", None) for name in TERMS}
    return shared._replace(terms=shared.terms._replace(**tensors))
