"""Passes the position state of a forward pass (``Shared``) from a stack to its layers' attention.

Layers of one kind, which have equal encodings, share a state: ``3*rope,none`` has kinds 0 and 1.
fairseq calls layers and attention with fixed arguments, so a stack stores the states in a
thread-local (not in a ``ContextVar``, which ``torch.compile`` cannot trace). No module keeps them
after the forward pass.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from fairseq_posenc.encodings.base import Dims
from fairseq_posenc.errors import UserError
from fairseq_posenc.shared import Shared
from fairseq_posenc.specs import Spec

_context = threading.local()  # `states`: of the stack that runs in this thread, or None


def current_context() -> tuple[Shared, ...] | None:
    """Get the position states of the stack that runs, by kind of layer; None outside a stack."""
    return getattr(_context, "states", None)


def state_of_kind(stack: tuple[Spec, Dims] | None, kind: int) -> Shared:
    """Get the position state of a kind of layer; refuse a call outside its stack's forward."""
    states = current_context()
    if states is None or states[0].stack != stack:  # both are None if no stack built the attention
        raise UserError("attention was called outside its stack's forward, so it has no positions")
    return states[kind]


@contextmanager
def set_context(states: tuple[Shared, ...] | None) -> Iterator[None]:
    """Set the position states of a stack while a block runs; with None, no stack seems to run."""
    before = current_context()
    _context.states = states
    try:
        yield
    finally:
        _context.states = before
