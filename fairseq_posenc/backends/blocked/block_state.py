"""The tensors of a block of scores: its parts, and the weights that they give.

Shapes: c pairs of sentence and head in a chunk, M queries and W keys of a block, N queries of a
tile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from fairseq_posenc.backends.blocked.geometry import Rule
from fairseq_posenc.backends.blocked.spread import SpreadProducts, add_pairs


class BlockState(NamedTuple):
    """The tensors of a block after its forward pass, or those saved of them; each ``(c, M, W)``."""

    # products of queries and keys; a sum without a gain overwrites it
    content: Tensor | None = None
    gain: Tensor | None = None  # multiplies the content; a view of a table, never saved
    # products of queries and their table rows; in a sum, maybe in tiles `(c, tiles, N, W)`, or
    # `SpreadProducts` with one product for each run of distances
    query_term: Tensor | SpreadProducts | None = None
    # products of keys and theirs; in a sum, maybe `SpreadProducts`
    key_term: Tensor | SpreadProducts | None = None
    weights: Tensor | None = None  # after the softmax; dropped ones are negative
    scores: Tensor | None = None  # before a temperature multiplies them; never saved
    capped: Tensor | None = None  # tanh(score / cap); of a product never saved

    def select_saved(self, rule: Rule) -> BlockState:
        """Select the tensors for a backward pass.

        They are the weights of a sum, and the parts of a product, whose gradients need each other.
        """
        if rule.product:
            return BlockState(self.content, None, self.query_term, self.key_term)
        content = None if self.gain is None else self.content
        return BlockState(content, weights=self.weights, capped=self.capped)

    def combine(self, product: bool) -> Tensor:
        """Combine the fields: their product, or content * gain + query term + key term."""
        scores, gain, *terms = self[:4]
        assert scores is not None
        present = [term for term in terms if term is not None]
        if gain is not None:
            scores = scores * gain
        if product:  # the content is needed again
            return _multiply(scores, present)
        for term in present:
            add_pairs(scores, term)
        return scores

    def compute_gradient(self, name: str, grad: Tensor, product: bool) -> Tensor:
        """Compute the gradient of a part of the scores, ``(c, M, W)``, from that of the scores.

        Args:
            name: the field, or ``bias``, which is always a summand.
            grad: gradient of the scores; returned itself if the part's is the same.
            product: whether the fields are multiplied.
        """
        if name == "bias":
            return grad
        if product:
            part = getattr(self, name)
            others = [x for x in self[:4] if x is not None and x is not part]
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
