"""Computes scores that are a product of three terms by matrix products, where distances share rows.

The score of a pair is ``(q.k) (q.Q_r) (k.K_r)``. If all pairs of a patch have one table row r, the
two numbers are *folded* into the vectors: the score is the dot product of ``(q.Q_r) q`` and
``(k.K_r) k``. A single matrix product computes all scores of the patch, and nothing is multiplied
pair by pair. The same holds for the gradients: that of the scaled query is a weighted sum of scaled
keys, and its dot product with q is the gradient of ``q.Q_r``. In other patches the three terms are
computed and multiplied.

Shapes: D head size; c pairs of sentence and head in a chunk, M queries and W keys of a block, U
distinct rows that a block needs; members, the queries or the keys of a block.
"""

from torch import Tensor

from fairseq_posenc.backends.blocked.skew import KEY_SIDE, QUERY_SIDE
from fairseq_posenc.backends.blocked.spread import Patch, Spread


class FoldedSide:
    """One side of a block: its vectors, and their products with table rows, the multipliers.

    Args:
        members: queries or keys, ``(c, members, D)``.
        spread: multiplies them with the rows of their table.
        side: QUERY_SIDE or KEY_SIDE.
    """

    def __init__(self, members: Tensor, spread: Spread, side: int) -> None:
        self.members = members
        self.spread = spread
        self.side = side
        self.multipliers = spread.multiply(members)
        self._scaled: dict[int, Tensor] = {}  # by row: all members, times their products with it

    def select_vectors(self, patch: Patch) -> Tensor:
        """Select the vectors of a patch's members, scaled if the patch has a single row."""
        vectors = self.members
        if patch.row is not None:
            if patch.row not in self._scaled:
                self._scaled[patch.row] = vectors * self.multipliers.products[:, :, patch.row, None]
            vectors = self._scaled[patch.row]
        return patch.select_members(vectors, self.side)

    def add_scaled_gradient(
        self, patch: Patch, scaled_grad: Tensor, member_grad: Tensor, multiplier_grad: Tensor
    ) -> None:
        """Add the gradients of members and multipliers, given that of a patch's scaled vectors.

        Args:
            patch: with a single row.
            scaled_grad: gradient of the scaled vectors of the patch's members.
            member_grad: gradient of all members, ``(c, members, D)``.
            multiplier_grad: gradient of all multipliers, ``(c, members, U)``.
        """
        members = patch.select_members(self.members, self.side)
        multipliers = patch.select_members(self.multipliers.products, self.side)
        member_grad = patch.select_members(member_grad, self.side)
        multiplier_grad = patch.select_members(multiplier_grad, self.side)
        member_grad.addcmul_(scaled_grad, multipliers[:, :, patch.row, None])
        multiplier_grad[:, :, patch.row].add_((members * scaled_grad).sum(-1))


def multiply_sides(query: FoldedSide, key: FoldedSide) -> Tensor:
    """Compute the scores of a block, ``(c, M, W)``.

    Both sides have the same runs of distances, so the same patches, which hold each pair once.
    """
    scores = query.members.new_empty(*query.members.shape[:2], key.members.size(1))
    for patch in query.spread.patches:
        pairs = patch.select(scores)
        pairs.baddbmm_(query.select_vectors(patch), key.select_vectors(patch).mT, beta=0)
        if patch.row is None:
            pairs.mul_(query.multipliers.select(patch)).mul_(key.multipliers.select(patch))
    return scores


def add_gradients(
    query: FoldedSide,
    key: FoldedSide,
    grad: Tensor,
    member_grads: tuple[Tensor, Tensor],
    table_grads: tuple[Tensor | None, Tensor | None],
) -> None:
    """Add the gradients of both sides of a block and of their tables.

    Args:
        query: the side of the queries.
        key: the side of the keys.
        grad: gradient of the scores, ``(c, M, W)``.
        member_grads: gradients of queries, ``(c, M, D)``, and of keys, ``(c, D, W)``, transposed as
            in :class:`~fairseq_posenc.backends.blocked.operands.Operands`.
        table_grads: gradients of both tables; None for one that needs none.
    """
    query_grad, key_grad = member_grads
    query_multiplier_grad = query.spread.begin_sums(grad)
    key_multiplier_grad = key.spread.begin_sums(grad)
    for patch in query.spread.patches:
        pairs = patch.select(grad)
        queries, keys = query.select_vectors(patch), key.select_vectors(patch)
        if patch.row is not None:
            query.add_scaled_gradient(patch, pairs @ keys, query_grad, query_multiplier_grad)
            # Multiplied in this order, the product has the layout of the keys' gradient.
            key.add_scaled_gradient(
                patch, (queries.mT @ pairs).mT, key_grad.mT, key_multiplier_grad
            )
            continue
        query_multipliers = query.multipliers.select(patch)
        key_multipliers = key.multipliers.select(patch)
        by_content = pairs * (queries @ keys.mT)  # [c, M, W]
        query.spread.add_by_row(query_multiplier_grad, patch, by_content * key_multipliers)
        key.spread.add_by_row(key_multiplier_grad, patch, by_content * query_multipliers)
        content_grad = pairs * query_multipliers * key_multipliers
        patch.select_members(query_grad, QUERY_SIDE).baddbmm_(content_grad, keys)
        patch.select_members(key_grad.mT, KEY_SIDE).mT.baddbmm_(queries.mT, content_grad)
    query.spread.add_gradients(query_multiplier_grad, query.members, query_grad, table_grads[0])
    key.spread.add_gradients(key_multiplier_grad, key.members, key_grad, table_grads[1])
