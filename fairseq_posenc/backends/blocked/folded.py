"""Computes products of three terms, whose table rows serve runs of distances, by matrix products.

The score of a pair is ``(q.k) (q.Q_r) (k.K_r)``. If all pairs of a patch have one row r, the score
is the dot product of two scaled vectors, ``(q.Q_r) q`` and ``(k.K_r) k``: a single matrix product
computes it, and no number of a pair is multiplied. The same holds for the gradients: that of the
scaled query is a weighted sum of scaled keys, and its dot product with q is the gradient of
``q.Q_r``. In other patches the three terms are computed and multiplied.

Shapes: D head size; c pairs of sentence and head in a chunk, M queries and W keys of a block, U
distinct rows that a block needs.
"""

from torch import Tensor

from fairseq_posenc.backends.blocked.skew import KEY_SIDE, QUERY_SIDE
from fairseq_posenc.backends.blocked.spread import Patch, Spread


class Factor:
    """One side of a block: vectors, and the numbers that multiply the pairs of each of them.

    Args:
        members: queries or keys, ``(c, members, D)``.
        spread: multiplies them with the rows of their table; None without a table.
        side: QUERY_SIDE or KEY_SIDE.
    """

    def __init__(self, members: Tensor, spread: Spread | None, side: int) -> None:
        self.members = members
        self.spread = spread
        self.side = side
        self.numbers = None if spread is None else spread.multiply(members)
        self._scaled: dict[int, Tensor] = {}  # by row

    def select_vectors(self, patch: Patch) -> Tensor:
        """Select the vectors of a patch, ``(c, members, D)``, scaled if it has a single row."""
        members = self.members
        if self.numbers is not None and patch.row is not None:
            if patch.row not in self._scaled:
                self._scaled[patch.row] = members * self.numbers.products[:, :, patch.row, None]
            members = self._scaled[patch.row]
        return patch.select_members(members, self.side)

    def select_numbers(self, patch: Patch) -> Tensor | float:
        """Select the numbers of a patch's pairs, ``(c, M, W)``; 1 without a table."""
        return 1.0 if self.numbers is None else self.numbers.select(patch)

    def begin_gradients(self, pairs: Tensor) -> Tensor | None:
        """Begin the gradients of all numbers, ``(c, members, U)``; None without any."""
        return None if self.spread is None else self.spread.begin_sums(pairs)

    def add_vector_sums(
        self, patch: Patch, vector_sums: Tensor, total: Tensor, sums: Tensor | None
    ) -> None:
        """Add the gradients of a patch that has a single row.

        Args:
            patch: with a row.
            vector_sums: gradient of the scaled vectors, ``(c, members, D)``.
            total: gradient of all vectors, ``(c, members, D)``.
            sums: gradient of the numbers (:meth:`begin_gradients`).
        """
        total = patch.select_members(total, self.side)
        if self.numbers is None or sums is None:
            total.add_(vector_sums)
            return
        members, numbers, sums = (
            patch.select_members(x, self.side) for x in (self.members, self.numbers.products, sums)
        )
        total.addcmul_(vector_sums, numbers[:, :, patch.row, None])
        sums[:, :, patch.row].add_((members * vector_sums).sum(-1))

    def finish_gradients(self, sums: Tensor | None, total: Tensor, table: Tensor | None) -> None:
        """Add the gradients of the numbers to those of vectors and table."""
        if self.spread is not None and sums is not None:
            self.spread.add_gradients(sums, self.members, total, table)


def multiply_factors(query: Factor, key: Factor, patches: tuple[Patch, ...]) -> Tensor:
    """Compute the scores of a block, ``(c, M, W)``."""
    scores = query.members.new_empty(*query.members.shape[:2], key.members.size(1))
    for patch in patches:
        pairs = patch.select(scores)
        pairs.baddbmm_(query.select_vectors(patch), key.select_vectors(patch).mT, beta=0)
        if patch.row is None:
            pairs.mul_(query.select_numbers(patch)).mul_(key.select_numbers(patch))
    return scores


def add_factor_gradients(
    query: Factor,
    key: Factor,
    patches: tuple[Patch, ...],
    grad: Tensor,
    totals: tuple[Tensor, Tensor],
    tables: tuple[Tensor | None, Tensor | None],
) -> None:
    """Add the gradients of a block.

    Args:
        query: of the block.
        key: of the block.
        patches: of both.
        grad: gradient of the scores, ``(c, M, W)``.
        totals: gradients of queries, ``(c, M, D)``, and of keys, ``(c, D, W)``.
        tables: gradients of their tables; None for one that needs none.
    """
    query_total, key_total = totals
    query_sums = query.begin_gradients(grad)
    key_sums = key.begin_gradients(grad)
    for patch in patches:
        pairs = patch.select(grad)
        queries, keys = query.select_vectors(patch), key.select_vectors(patch)
        if patch.row is not None:
            query.add_vector_sums(patch, pairs @ keys, query_total, query_sums)
            key.add_vector_sums(patch, (queries.mT @ pairs).mT, key_total.mT, key_sums)
            continue
        by_query = query.select_numbers(patch)
        by_key = key.select_numbers(patch)
        by_content = pairs * (queries @ keys.mT)  # [c, M, W]
        for factor, others, sums in ((query, by_key, query_sums), (key, by_query, key_sums)):
            if factor.spread is not None and sums is not None:
                factor.spread.add_by_row(sums, patch, by_content * others)
        content_grad = pairs * by_query * by_key
        patch.select_members(query_total, QUERY_SIDE).baddbmm_(content_grad, keys)
        patch.select_members(key_total.mT, KEY_SIDE).mT.baddbmm_(queries.mT, content_grad)
    query.finish_gradients(query_sums, query_total, tables[0])
    key.finish_gradients(key_sums, key_total, tables[1])
