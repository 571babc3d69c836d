"""The cache of one forward pass, which the layers of a stack share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

_T = TypeVar("_T")


class PerForwardCache:
    """Cache of one forward pass: the first layer that asks computes a value, the others reuse it.

    For each key the latest value is kept.
    """

    def __init__(self) -> None:
        self._values: dict[str, tuple[tuple[object, ...], Any]] = {}

    def get(self, key: str, deps: tuple[object, ...], compute: Callable[[], _T]) -> _T:
        """Look up a value, or compute it if a dependency has changed.

        Args:
            key: name of the value.
            deps: values that the result depends on. Tensors are compared by identity: a layer that
                is run again in the backward pass has others, with gradients of their own.
            compute: computes the value.
        """
        if torch.compiler.is_compiling():  # the compiler finds common subexpressions itself
            return compute()
        now = (torch.is_grad_enabled(), *deps)
        before, value = self._values.get(key, ((), None))
        if len(before) != len(now) or not all(map(_is_same, before, now)):
            value = compute()
            self._values[key] = now, value
        computed: _T = value
        return computed


def _is_same(before: object, now: object) -> bool:
    tensors = isinstance(before, Tensor) or isinstance(now, Tensor)
    return before is now if tensors else before == now
