"""Computes the scores ``(q.k) (q.Q_r) (k.K_r)`` with one matrix product where pairs share row r.

If all pairs of a patch have one row r in both tables, the two *multipliers* ``q.Q_r`` and ``k.K_r``
are *folded* into the vectors: the score is the dot product of ``(q.Q_r) q`` and ``(k.K_r) k``, so
nothing is multiplied pair by pair. The same holds for the gradients: the gradient of the scaled
query is a weighted sum of scaled keys, and the dot product of this sum with q is the gradient of
``q.Q_r``. In other patches the three terms are computed and multiplied.

Both tables have the same runs of distances, so both sides of a block have the same patches.

Shapes: D head size; c pairs of sentence and head in a chunk, M queries and W keys of a block, U
distinct rows that a block needs; members, the queries or the keys of a block.
"""

from torch import Tensor

from fairseq_posenc.backends.blocked.skew import KEY_SIDE, QUERY_SIDE
from fairseq_posenc.backends.blocked.spread import Patch, Spread


class FoldedSide:
    """One side of a block: its vectors, and their multipliers, the products with table rows.

    Args:
        members: queries or keys, ``(c, members, D)``.
        spread: multiplies them with the rows of their table.
    """

    def __init__(self, members: Tensor, spread: Spread) -> None:
        self.members = members
        self.spread = spread
        self.multipliers = spread.multiply(members)
        self._scaled: dict[int, Tensor] = {}  # by row: all members, times their products with it

    def select_vectors(self, patch: Patch) -> Tensor:
        """Select the vectors of a patch's members, times multipliers if it has a single row."""
        vectors = self.members
        if patch.row is not None:
            if patch.row not in self._scaled:
                self._scaled[patch.row] = vectors * self.multipliers.by_row[:, :, patch.row, None]
            vectors = self._scaled[patch.row]
        return patch.select_members(vectors, self.spread.side)

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
        side = self.spread.side
        members = patch.select_members(self.members, side)
        multipliers = patch.select_members(self.multipliers.by_row, side)[:, :, patch.row, None]
        patch.select_members(member_grad, side).addcmul_(scaled_grad, multipliers)
        patch_grad = patch.select_members(multiplier_grad, side)[:, :, patch.row]
        patch_grad.add_((members * scaled_grad).sum(-1))


def compute_scores(query: FoldedSide, key: FoldedSide) -> Tensor:
    """Compute the scores of a block, ``(c, M, W)``."""
    # Each pair is in one patch, whose product overwrites it (`beta=0`).
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

    If blocks share the products of keys with rows, those of keys and their table are added later,
    after the last block (see :class:`~fairseq_posenc.backends.blocked.spread.KeyProducts`).

    Args:
        query: the side of the queries.
        key: the side of the keys.
        grad: gradient of the scores, ``(c, M, W)``.
        member_grads: gradients of queries, ``(c, M, D)``, and of keys, ``(c, D, W)``, transposed as
            in :class:`~fairseq_posenc.backends.blocked.operands.Operands`.
        table_grads: gradients of both tables; None for one that needs none.
    """
    query_grad, key_grad = member_grads
    query_multiplier_grad = query.spread.prepare_row_sums(like=grad)
    key_multiplier_grad = key.spread.prepare_row_sums(like=grad)
    grad_of_keys = key_grad.mT  # [c, W, D]
    for patch in query.spread.patches:
        pairs = patch.select(grad)
        queries, keys = query.select_vectors(patch), key.select_vectors(patch)
        if patch.row is not None:
            query.add_scaled_gradient(patch, pairs @ keys, query_grad, query_multiplier_grad)
            # Multiplied in this order, the product has the layout of the keys' gradient.
            scaled_grad = (queries.mT @ pairs).mT
            key.add_scaled_gradient(patch, scaled_grad, grad_of_keys, key_multiplier_grad)
            continue
        query_multipliers = query.multipliers.select(patch)
        key_multipliers = key.multipliers.select(patch)
        grad_times_content = pairs * (queries @ keys.mT)  # of the patch's pairs
        query.spread.add_by_row(query_multiplier_grad, patch, grad_times_content * key_multipliers)
        key.spread.add_by_row(key_multiplier_grad, patch, grad_times_content * query_multipliers)
        content_grad = pairs * query_multipliers * key_multipliers
        patch.select_members(query_grad, QUERY_SIDE).baddbmm_(content_grad, keys)
        patch.select_members(grad_of_keys, KEY_SIDE).mT.baddbmm_(queries.mT, content_grad)
    query.spread.add_gradients(query_multiplier_grad, query.members, query_grad, table_grads[0])
    key.spread.add_gradients(key_multiplier_grad, key.members, key_grad, table_grads[1])
