"""Passes the position state of a forward pass (``Shared``) from a stack to its layers.

fairseq calls layers with fixed arguments, so a stack stores the state in a thread-local (not in a
``ContextVar``, which ``torch.compile`` cannot trace), and a forward-pre-hook adds it as keyword
arguments. Activation checkpointing passes these to the layer again in the backward pass. No module
keeps the state after the forward pass.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch import nn

from fairseq_posenc.encodings.rotation import PairRotation
from fairseq_posenc.errors import UserError
from fairseq_posenc.shared import Shared


class _Context(threading.local):
    """The position state of the forward pass that this thread is in."""

    stack: tuple[Shared, ...] | None = None  # of the stack that runs, for each kind of layer
    layer: Shared | None = None  # of the layer that runs


_context = _Context()


def current_context() -> tuple[Shared, ...] | None:
    """Get the position state of the stack that runs; None outside a stack."""
    return _context.stack


def current_layer() -> Shared:
    """Get the position state of the layer that runs; refuse a call outside a layer."""
    if _context.layer is None:
        raise UserError("attention was called outside its layer, so it has no positions")
    return _context.layer


@contextmanager
def set_context(
    stack: tuple[Shared, ...] | None = None, layer: Shared | None = None
) -> Iterator[None]:
    """Set the state of a stack, or that of a layer (in which no stack runs), while a block runs."""
    before = _context.stack, _context.layer
    _context.stack, _context.layer = stack, layer
    try:
        yield
    finally:
        _context.stack, _context.layer = before


def inject_context(
    layer: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Add the current position state to a layer's arguments: a forward-pre-hook.

    Each tensor of a term is an argument ``shared_TERM_FIELD``: tensors inside a tuple would lose
    their gradients under activation checkpointing.
    """
    if _context.stack is None:
        raise UserError("a layer was called outside its stack's forward, so it has no positions")
    shared = _context.stack[cast(Any, layer).self_attn.kind]  # one for equal encodings
    tensors = {f"shared_{name}": tensor for name, tensor in shared.terms.tensors().items()}
    if isinstance(shared.rotation, PairRotation) and shared.rotation.phases.requires_grad:
        tensors["shared_phases"] = shared.rotation.phases  # other rotations have no gradients
    # From its encodings a layer would compute the terms again, without the arguments' gradients.
    shared = shared._replace(encodings=())
    return args, {**kwargs, "shared": shared, **tensors}


def pop_context(shared: Shared, kwargs: dict[str, Any]) -> Shared:
    """Undo :func:`inject_context` in a layer; remove the tensors from ``kwargs``, in place."""
    tensors = [kwargs.pop(f"shared_{name}") for name in shared.terms.tensors()]
    shared = shared._replace(terms=shared.terms.with_tensors(tensors))  # in their order above
    phases = kwargs.pop("shared_phases", None)
    if phases is None:
        return shared
    assert isinstance(shared.rotation, PairRotation)
    return shared._replace(rotation=shared.rotation._replace(phases=phases))
