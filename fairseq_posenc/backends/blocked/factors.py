"""The rule that combines content and tables to a score, and its gradient."""

from __future__ import annotations

from functools import reduce
from typing import NamedTuple

from torch import Tensor


class Factors(NamedTuple):
    """What scores ``(c, M, W)`` are combined from, each of that shape or broadcast to it.

    In a sum, a term may also have queries or keys in tiles: ``(c, tiles, N, W)``,
    ``(c, M, tiles, N)``.
    """

    content: Tensor
    gain: Tensor | None
    by_query: Tensor | None
    by_key: Tensor | None

    def combine(self, product: bool) -> Tensor:
        """Return their product, or the sum in which gain multiplies the content alone.

        The sum without a gain overwrites the content, which its gradient does not need.
        """
        scores, gain, *terms = self
        if gain is not None:
            scores = scores * gain
        for term in terms:
            if term is None:
                continue
            if not product:
                (scores.view(term.shape) if term.dim() == 4 else scores).add_(term)
            elif scores is self.content:
                scores = scores * term
            else:
                scores.mul_(term)
        return scores

    def backward(self, grad: Tensor, product: bool) -> Factors:
        """Return the gradient of each, ``(c, M, W)``, for that of the scores."""
        if not product:
            if self.gain is None:
                return Factors(grad, None, grad, grad)
            return Factors(grad * self.gain, grad * self.content, grad, grad)

        def by_others(factor: Tensor | None) -> Tensor | None:
            if factor is None:
                return None
            others = [other for other in self if other is not None and other is not factor]
            return reduce(Tensor.mul_, others[1:], grad * others[0]) if others else grad

        content = by_others(self.content)
        assert content is not None
        return Factors(content, *map(by_others, self[1:]))
