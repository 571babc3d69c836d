"""Changes the parts of a model whose positions are set: derived classes, and stand-ins.

An object whose behaviour changes gets a class derived from its stock class and from one or more
mixins, which come first. There is one class for each stock class and set of mixins, so a stack that
is itself the model (``BertModel``, ``LlamaModel``) has the mixins of a stack and of a model in a
single class. A mixin that changes ``forward`` has a method ``run_forward(forward, args, named)``,
which gets the stock one. A hook does not suffice: it runs if a module is called, not if only its
``forward`` is, which may be a compiled method.

Stand-ins replace positions that were removed, which the model's own code calls. They work only
within a forward pass that the stack has prepared: a part of a model that is called by itself would
otherwise compute without positions, which nobody would notice.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fairseq_posenc.errors import UserError

CALLED_BY_ITSELF = "a part of a model was called by itself: positions need a call of the whole one"
OWN_CODE = "computes attention by code of its own, which takes no other positions than rotations"


class Derived:
    """Base of mixins: objects of derived classes are copied and pickled by their stock class."""

    is_first: ClassVar[bool] = False  # whether a mixin's methods come before those of other mixins
    stock: Any  # the stock class; `derive` sets it, and `mixins`
    mixins: "tuple[type[Derived], ...]"

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _make_empty, (self.stock, self.mixins), self.__dict__


@cache
def derive(stock: Any, mixins: tuple[type[Derived], ...]) -> Any:
    """Derive a class from a stock class.

    It has the stock class's name and module, by which transformers selects losses, conversions of
    weights, recorded outputs, and models for pipelines.
    """
    attributes = {"__module__": stock.__module__, "__doc__": stock.__doc__}
    attributes |= {"stock": stock, "mixins": mixins}
    derived: Any = type(stock.__name__, (*mixins, stock), attributes)
    if hasattr(derived, "run_forward"):  # a method of mixins of a stack or an attention

        @wraps(stock.forward)  # transformers reads its signature
        def forward(module: Any, *args: Any, **named: Any) -> Any:
            return module.run_forward(stock.forward, args, named)

        derived.forward = forward
    return derived


def add_mixin(part: nn.Module, mixin: type[Derived]) -> None:
    """Add a mixin to the class of a module, in place."""
    cls: Any = type(part)
    mixins = getattr(cls, "mixins", ())
    if mixin not in mixins:
        ordered = sorted((*mixins, mixin), key=lambda x: not x.is_first)
        part.__class__ = derive(getattr(cls, "stock", cls), tuple(ordered))
    if hasattr(part, "_old_forward"):  # accelerate has replaced `forward`, and calls this one
        part._old_forward = type(part).forward.__get__(part)


def refuse_replaced_forward(part: nn.Module) -> None:
    """Refuse a module whose own ``forward`` was replaced: its class's would not be called."""
    if "forward" in vars(part) and not hasattr(part, "_old_forward"):
        raise UserError(
            f"the forward of this model's {type(part).__name__} was replaced, for example by a "
            "compiled one: set positions before"
        )


def _make_empty(stock: Any, mixins: tuple[type[Derived], ...]) -> Any:
    """Create an empty object of a derived class, for pickle to fill."""
    derived = derive(stock, mixins)
    return derived.__new__(derived)


_pass = threading.local()  # has `cosines` in a pass; torch.compile traces no `ContextVar`


@contextmanager
def begin_pass(cosines: tuple[Any, Any]) -> Iterator[None]:
    """Let the stand-ins work inside; give them cosines and sines, Nones where layers differ."""
    before = getattr(_pass, "cosines", None)
    _pass.cosines = cosines
    try:
        yield
    finally:
        _pass.cosines = before


class NoRotation(nn.Module):
    """Replaces a model's rotary module, which no attention reads any more; code around it may."""

    def forward(self, *args: Any, **named: Any) -> Any:
        """Return the cosines and sines of all layers; None, None where they differ."""
        if (cosines := getattr(_pass, "cosines", None)) is None:
            raise UserError(CALLED_BY_ITSELF)
        return cosines


class NoPositions(NoRotation):
    """Replaces a table of positions by zero."""

    def forward(self, *args: Any, **named: Any) -> Tensor:
        """Return a scalar zero, which can be added to vectors of any dtype and device."""
        super().forward()  # refuses a call outside of a pass
        return torch.zeros(())


class NoBias(nn.Module):
    """Replaces a table of distances by zeros; the attention that calls it has checked the pass."""

    def __init__(self) -> None:
        super().__init__()
        # It is not a parameter, but transformers initializes a tensor of this name on loading.
        self.weight = torch.empty(0)

    def forward(self, buckets: Tensor) -> Tensor:
        """Return a zero for all heads and distances, ``(1, 1, 1)``, whatever the buckets are."""
        return torch.zeros(1, 1, 1, device=buckets.device)
