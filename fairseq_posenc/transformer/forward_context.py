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

    stack: tuple[Shared, ...] | None = None  # of the stack that runs, for each kind of its layers
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
    # With its encodings, it would compute the terms again when a layer is recomputed, and the
    # arguments would get no gradients.
    shared = shared._replace(encodings=())
    return args, {**kwargs, "shared": shared, **tensors}


def extract_context(shared: Shared, kwargs: dict[str, Any]) -> tuple[Shared, dict[str, Any]]:
    """Undo :func:`inject_context` in a layer: return the state, and the layer's own arguments."""
    own = {name: value for name, value in kwargs.items() if not name.startswith("shared_")}
    tensors = [kwargs[f"shared_{name}"] for name in shared.terms.tensors()]
    shared = shared._replace(terms=shared.terms.with_tensors(tensors))  # in their order above
    if "shared_phases" in kwargs:
        assert isinstance(shared.rotation, PairRotation)
        rotation = shared.rotation._replace(phases=kwargs["shared_phases"])
        shared = shared._replace(rotation=rotation)
    return shared, own
