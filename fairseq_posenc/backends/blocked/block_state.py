"""The tensors of a block of scores: its parts, and the weights that they give.

The parts are either added, ``content * gain + query_term + key_term`` (a *sum*), or all multiplied
(a *product*).

Shapes: c pairs of sentence and head in a chunk, M queries and W keys of a block.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from fairseq_posenc.backends.blocked.geometry import Rule
from fairseq_posenc.backends.blocked.spread import SpreadProducts, add_pairs


class BlockState(NamedTuple):
    """The tensors of a block after its forward pass, or those saved of them; each ``(c, M, W)``."""

    # The parts. In a sum, the terms may have any form that `add_pairs` takes.
    content: Tensor | None = None  # products of queries and keys
    gain: Tensor | None = None  # a view of a table, which the backward pass makes again
    query_term: Tensor | SpreadProducts | None = None  # products of queries and their table rows
    key_term: Tensor | SpreadProducts | None = None  # products of keys and theirs
    weights: Tensor | None = None  # after the softmax; dropped ones are negative
    scores: Tensor | None = None  # before a temperature multiplies them; never saved
    capped: Tensor | None = None  # tanh(score / cap); of a product never saved

    @property
    def parts(self) -> tuple[Any, ...]:
        """Content, gain, query term and key term."""
        return self[:4]

    def select_saved(self, rule: Rule) -> BlockState:
        """Select the tensors for a backward pass: the weights of a sum, the parts of a product.

        In a product, the gradient of each part needs the other parts.
        """
        if rule.product:
            return BlockState(self.content, query_term=self.query_term, key_term=self.key_term)
        content = None if self.gain is None else self.content
        return BlockState(content, weights=self.weights, capped=self.capped)

    def combine(self, product: bool) -> Tensor:
        """Combine the parts to scores; a sum without a gain overwrites the content."""
        content, gain, *terms = self.parts
        present = [term for term in terms if term is not None]
        scores: Tensor = content if gain is None else content * gain
        if product:  # the content is needed again
            return _multiply(scores, present)
        for term in present:
            add_pairs(scores, term)
        return scores

    def compute_gradient(self, name: str, grad: Tensor, product: bool) -> Tensor:
        """Compute the gradient of a part of the scores, ``(c, M, W)``, from that of the scores.

        Args:
            name: the field, or ``bias``, which is always a summand.
            grad: gradient of the scores; returned as it is if nothing multiplies the part.
            product: whether the fields are multiplied.
        """
        if name == "bias":
            return grad
        if product:
            part = getattr(self, name)
            others = [x for x in self.parts if x is not None and x is not part]
        else:  # only content and gain multiply each other
            other = {"content": self.gain, "gain": self.content}.get(name)
            others = [] if other is None else [other]
        return _multiply(grad, others)


def _multiply(pairs: Tensor, factors: list[Any]) -> Tensor:
    """Multiply ``(c, M, W)`` by factors, into a new tensor unless there are none."""
    product = pairs
    for factor in factors:
        product = pairs * factor if product is pairs else product.mul_(factor)
    return product
