"""The tensors of a block: the parts of its scores, and the attention weights that they give.

The parts are either added, ``content * gain + query_term + key_term`` (a *sum*), or all multiplied
(a *product*). For its backward pass, a sum saves the weights; a product saves its parts, which the
gradients need, and computes the weights from them again.

Shapes: c pairs of sentence and head in a chunk, M queries and W keys of a block.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from fairseq_posenc.backends.blocked.spread import SpreadProducts, add_pairs


class BlockState(NamedTuple):
    """The tensors of a block, each ``(c, M, W)``; None for one absent or not yet computed."""

    # The parts. Terms of a sum may also be in tiles or SpreadProducts, which `add_pairs` can add.
    content: Tensor | None = None  # products of queries and keys
    gain: Tensor | None = None  # factor of the content; not saved, since it is a view of a table
    query_term: Tensor | SpreadProducts | None = None  # products of queries and their table rows
    key_term: Tensor | SpreadProducts | None = None  # products of keys and their table rows
    weights: Tensor | None = None  # after the softmax; negative if dropped
    scores: Tensor | None = None  # before a temperature multiplies them; never saved
    capped: Tensor | None = None  # tanh(score / cap)

    @property
    def parts(self) -> tuple[Any, ...]:
        """Content, gain, query term and key term."""
        return self.content, self.gain, self.query_term, self.key_term

    def select_saved(self, product: bool) -> BlockState:
        """Select the tensors to save for the backward pass.

        In a product, the gradient of each part needs all others; in a sum, only that of the gain
        needs the content.
        """
        if product:
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
            name: the field of the part; or ``bias``, which is added after they are combined.
            grad: gradient of the scores; returned as it is if nothing multiplies the part.
            product: whether the parts are multiplied.
        """
        factors: list[Any] = []
        if product and name != "bias":
            part = getattr(self, name)
            factors = [x for x in self.parts if x is not part]
        elif name == "content":
            factors = [self.gain]
        elif name == "gain":
            factors = [self.content]
        return _multiply(grad, [x for x in factors if x is not None])


def _multiply(pairs: Tensor, factors: list[Any]) -> Tensor:
    """Multiply ``(c, M, W)`` by factors, into a new tensor unless there are none."""
    product = pairs
    for factor in factors:  # the first product is new, and multiplied in place from then on
        product = pairs * factor if product is pairs else product.mul_(factor)
    return product
