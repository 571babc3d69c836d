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

    content: Tensor | None
    gain: Tensor | None
    by_query: Tensor | None
    by_key: Tensor | None

    def combine(self, product: bool) -> Tensor:
        """Return their product, or the sum in which gain multiplies the content alone.

        The sum without a gain overwrites the content, which its gradient does not need.
        """
        scores, gain, *terms = self
        assert scores is not None
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

    def gradient(self, name: str, grad: Tensor, product: bool) -> Tensor:
        """Return the gradient of one of them, ``(c, M, W)``, for that of the scores.

        Args:
            name: of the field.
            grad: of the scores; returned itself where it is the same.
            product: how they are combined.
        """
        factor = getattr(self, name)
        others = [x for x in self if x is not None and x is not factor]
        if not product:
            gained = {"content": self.gain, "gain": self.content}
            others = [x for x in [gained.get(name)] if x is not None]
        return reduce(Tensor.mul_, others[1:], grad * others[0]) if others else grad
