"""Derives the classes of a model's parts whose behaviour changes when its positions are set.

An object gets a class derived from its stock class and from one or more mixins, which come first.
There is one class for each stock class and set of mixins, so a stack that is itself the model (a
``BertModel``, a ``LlamaModel``) has the mixins of a stack and of a model in a single class. A
mixin that changes ``forward`` has a method ``run_forward(forward, args, named)``, which gets the
stock one. So whoever calls ``forward``, a module or a compiled method, calls the same code; hooks
of modules would be skipped.
"""

from functools import cache, wraps
from typing import Any

from torch import nn

from fairseq_posenc.errors import UserError


class Derived:
    """Base of mixins: the objects of derived classes are copied and pickled by their stock class.

    :func:`derive` sets the attributes.

    Attributes:
        stock: the stock class.
        mixins: the mixins of the class.
    """

    stock: Any
    mixins: tuple[type, ...]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _make_empty, (self.stock, self.mixins), self.__dict__


@cache
def derive(stock: Any, mixins: tuple[type, ...]) -> Any:
    """Derive a class from a stock class.

    It has the stock class's name and module, by which transformers selects losses, conversions of
    weights, recorded outputs, and models for pipelines.
    """
    attributes = {
        "__module__": stock.__module__,
        "__doc__": stock.__doc__,
        "stock": stock,
        "mixins": mixins,
    }
    derived: Any = type(stock.__name__, (*mixins, stock), attributes)
    if hasattr(derived, "run_forward"):  # a method of mixins of a stack or an attention

        @wraps(stock.forward)  # transformers reads its signature
        def forward(module: Any, *args: Any, **named: Any) -> Any:
            return module.run_forward(stock.forward, args, named)

        derived.forward = forward
    return derived


def add_mixin(part: nn.Module, mixin: type) -> None:
    """Add a mixin to the class of a module, in place."""
    cls: Any = type(part)
    mixins = getattr(cls, "mixins", ())
    if mixin not in mixins:
        # In one order, so that a set of mixins has one class, whichever of them came first.
        ordered = sorted((*mixins, mixin), key=lambda cls: cls.__qualname__)
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


def _make_empty(stock: Any, mixins: tuple[type, ...]) -> Any:
    """Create an empty object of a derived class, for pickle to fill."""
    derived = derive(stock, mixins)
    return derived.__new__(derived)
