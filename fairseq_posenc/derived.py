"""Changes the behavior of objects in place: by derived classes, or by attributes for a while.

The class of an object that changes for good is derived from its stock class and from all of its
mixins, which come first. One mixin may change ``forward``, by a method ``run_forward(forward, args,
named)``, which calls the stock ``forward(self, ...)`` that it gets. A hook does not suffice: it
runs when a module is called, not when a program calls its ``forward``, perhaps compiled, directly.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, wraps
from typing import Any, ClassVar

from torch import nn

from fairseq_posenc.errors import UserError


class Derived:
    """Base of mixins: objects of derived classes are copied and pickled by their stock class."""

    is_first: ClassVar[bool] = False  # whether its methods override those of other mixins
    stock: Any  # the stock class; `derive` sets it, and `mixins`
    mixins: "tuple[type[Derived], ...]"

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _make_empty, (self.stock, self.mixins), self.__dict__


@cache
def derive(stock: Any, mixins: tuple[type[Derived], ...]) -> Any:
    """Derive a class from a stock class.

    It has the stock class's name and module, by which transformers finds a model's loss, conversion
    of weights and recorded outputs, and whether a pipeline takes the model.
    """
    attributes = {"__module__": stock.__module__, "__doc__": stock.__doc__}
    attributes |= {"stock": stock, "mixins": mixins}
    derived: Any = type(stock.__name__, (*mixins, stock), attributes)
    if hasattr(derived, "run_forward"):  # a mixin changes `forward`

        @wraps(stock.forward)  # callers may read its signature
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
            "compiled one: set positions first"
        )


@contextmanager
def with_attributes(changes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Set attributes of objects, as ``(object, name, value)``, while the block runs."""
    with ExitStack() as restoring:
        for owner, name, value in changes:
            if name in vars(owner):  # an attribute of its own: put it back
                restoring.callback(setattr, owner, name, vars(owner)[name])
            else:  # the attribute is its class's, or new
                restoring.callback(delattr, owner, name)
            setattr(owner, name, value)
        yield


def _make_empty(stock: Any, mixins: tuple[type[Derived], ...]) -> Any:
    """Create an empty object of a derived class, for pickle to fill."""
    derived = derive(stock, mixins)
    return derived.__new__(derived)
