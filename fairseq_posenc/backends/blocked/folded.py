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
from fairseq_posenc.backends.blocked.spread import Patch, Spread, SpreadProducts


class FoldedSide:
    """One side of a block: its vectors, and their products with table rows, the multipliers.

    Args:
        members: queries or keys, ``(c, members, D)``.
        spread: multiplies them with the rows of their table; None without a table.
        side: QUERY_SIDE or KEY_SIDE.
    """

    def __init__(self, members: Tensor, spread: Spread | None, side: int) -> None:
        self.members = members
        self.side = side
        self.multipliers = None if spread is None else spread.multiply(members)
        self._scaled: dict[int, Tensor] = {}  # all members, times their product with a row

    def select_vectors(self, patch: Patch) -> Tensor:
        """Select the vectors of a patch's members, scaled if the patch has a single row."""
        vectors = self.members
        if self.multipliers is not None and patch.row is not None:
            if patch.row not in self._scaled:
                self._scaled[patch.row] = vectors * self.multipliers.products[:, :, patch.row, None]
            vectors = self._scaled[patch.row]
        return patch.select_members(vectors, self.side)

    def select_multipliers(self, patch: Patch) -> Tensor | float:
        """Look up the multiplier of each pair of a patch; 1 without a table."""
        return 1.0 if self.multipliers is None else self.multipliers.select(patch)

    def begin_multiplier_grad(self, pairs: Tensor) -> SpreadProducts | None:
        """Make zeros for the gradient of the multipliers, of the dtype of ``pairs``."""
        if self.multipliers is None:
            return None
        return self.multipliers._replace(products=self.multipliers.spread.begin_sums(pairs))

    def add_scaled_grad(
        self,
        patch: Patch,
        grad: Tensor,
        member_grad: Tensor,
        multiplier_grad: SpreadProducts | None,
    ) -> None:
        """Add the gradient of the scaled vectors of a patch to those of members and multipliers.

        Args:
            patch: with a single row.
            grad: gradient of the scaled vectors of the patch's members.
            member_grad: gradient of all members, ``(c, members, D)``.
            multiplier_grad: see :meth:`begin_multiplier_grad`.
        """
        member_grad = patch.select_members(member_grad, self.side)
        if self.multipliers is None or multiplier_grad is None:
            member_grad.add_(grad)
            return
        members, multipliers, multiplier_grads = (
            patch.select_members(x, self.side)
            for x in (self.members, self.multipliers.products, multiplier_grad.products)
        )
        member_grad.addcmul_(grad, multipliers[:, :, patch.row, None])
        multiplier_grads[:, :, patch.row].add_((members * grad).sum(-1))


def multiply_sides(query: FoldedSide, key: FoldedSide, patches: tuple[Patch, ...]) -> Tensor:
    """Compute the scores of a block, ``(c, M, W)``; its patches hold each pair once."""
    scores = query.members.new_empty(*query.members.shape[:2], key.members.size(1))
    for patch in patches:
        pairs = patch.select(scores)
        pairs.baddbmm_(query.select_vectors(patch), key.select_vectors(patch).mT, beta=0)
        if patch.row is None:
            pairs.mul_(query.select_multipliers(patch)).mul_(key.select_multipliers(patch))
    return scores


def add_gradients(
    query: FoldedSide,
    key: FoldedSide,
    patches: tuple[Patch, ...],
    grad: Tensor,
    member_grads: tuple[Tensor, Tensor],
    table_grads: tuple[Tensor | None, Tensor | None],
) -> None:
    """Add the gradients of the two sides of a block and of their tables.

    Args:
        query: the side of the queries.
        key: the side of the keys.
        patches: of the block.
        grad: gradient of the scores, ``(c, M, W)``.
        member_grads: gradients of queries, ``(c, M, D)``, and of keys, ``(c, D, W)``, transposed as
            in :class:`~fairseq_posenc.backends.blocked.operands.Operands`.
        table_grads: gradients of both tables; None for one that needs none.
    """
    query_grad, key_grad = member_grads
    query_multiplier_grad = query.begin_multiplier_grad(grad)
    key_multiplier_grad = key.begin_multiplier_grad(grad)
    for patch in patches:
        pairs = patch.select(grad)
        queries, keys = query.select_vectors(patch), key.select_vectors(patch)
        if patch.row is not None:
            query.add_scaled_grad(patch, pairs @ keys, query_grad, query_multiplier_grad)
            # Multiplied in this order, the result has the layout of the keys' gradient.
            key.add_scaled_grad(patch, (queries.mT @ pairs).mT, key_grad.mT, key_multiplier_grad)
            continue
        query_multipliers = query.select_multipliers(patch)
        key_multipliers = key.select_multipliers(patch)
        by_content = pairs * (queries @ keys.mT)  # [c, M, W]
        for multiplier_grad, others in (
            (query_multiplier_grad, key_multipliers),
            (key_multiplier_grad, query_multipliers),
        ):
            if multiplier_grad is not None:
                sums = multiplier_grad.products
                multiplier_grad.spread.add_by_row(sums, patch, by_content * others)
        content_grad = pairs * query_multipliers * key_multipliers
        patch.select_members(query_grad, QUERY_SIDE).baddbmm_(content_grad, keys)
        patch.select_members(key_grad.mT, KEY_SIDE).mT.baddbmm_(queries.mT, content_grad)
    for side, multiplier_grad, member_grad, table_grad in zip(
        (query, key), (query_multiplier_grad, key_multiplier_grad), member_grads, table_grads
    ):
        if multiplier_grad is not None:
            multiplier_grad.spread.add_gradients(
                multiplier_grad.products, side.members, member_grad, table_grad
            )
