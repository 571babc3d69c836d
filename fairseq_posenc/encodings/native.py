"""What a model class of transformers has of an encoding, as the encoding's own file says it.

Such a file has two functions: ``to_hf(encoding)`` returns the classes that have its positions, and
``from_hf(model, config)`` what a configuration means by the encoding, None if it means another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Callable, NamedTuple, Optional

from torch import Tensor


class Carried(NamedTuple):
    """A parameter as it is there.

    Attributes:
        name: of the tensor, with ``{}`` for the number of the layer.
        there: gives it of ours.
        back: gives ours of it.
    """

    name: str
    there: Callable[[Tensor], Tensor]
    back: Callable[[Tensor], Tensor]


class Native(NamedTuple):
    """A model class that has an encoding's positions, and no others.

    Attributes:
        model: its name.
        config: what its configuration says of the positions.
        weights: the encoding's parameters, by their names.
        fixed: further tensors that it has for its positions.
        until: the last major version of transformers that has it; None for all.
    """

    model: str
    config: Mapping[str, Any]
    weights: Mapping[str, Carried] = {}
    fixed: Mapping[str, Tensor] = {}
    until: Optional[int] = None


class Meant(NamedTuple):
    """An encoding as a configuration there means it.

    Attributes:
        options: those that are not the default.
        max_positions: n.
    """

    options: Mapping[str, Any]
    max_positions: int
