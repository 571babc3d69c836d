"""Computes the attention weights of a chunk, block by block, and the gradients of their operands.

A chunk is some sentences and heads, a block some queries of it and the keys that they may see. A
score has up to four parts: content (query times key), gain, query term and key term (query or key
times a table row for the distance), which are added up or multiplied. If the first token is *reset*
(TUPE: it has no position), its pairs use two further table rows instead, one where it is the key,
one where it is the query. The scores of these pairs are two *lines* of the block, a column and a
row (:mod:`~fairseq_posenc.backends.blocked.reset`).

Decay is a sum of logarithms of forget gates over the tokens (FoX). An encoder has a second one, for
keys that come after the query (``later``).

A *band* is the run of table rows that a tile of queries (or keys) needs. *Skewed* gradients have a
column for each row of a band, so one matrix product sums them by distance
(:mod:`~fairseq_posenc.backends.blocked.skew`). If runs of distances share a row, its products are
spread along them instead (:mod:`~fairseq_posenc.backends.blocked.spread`).

The letters of shapes are those of :mod:`~fairseq_posenc.backends.blocked.geometry`.
"""

from functools import cached_property

import torch
from torch import Tensor

from fairseq_posenc.backends.blocked import dropout, folded
from fairseq_posenc.backends.blocked.block_state import BlockState
from fairseq_posenc.backends.blocked.folded import FoldedSide
from fairseq_posenc.backends.blocked.geometry import Block, Chunk, Geometry, Settings, Strip
from fairseq_posenc.backends.blocked.operands import FORBIDDEN, Operands, name_row_index
from fairseq_posenc.backends.blocked.reset import ResetLines, add_reset_rows, expand_reset_rows
from fairseq_posenc.backends.blocked.skew import (
    KEY_SIDE,
    QUERY_SIDE,
    Band,
    sum_by_distance,
    view_by_distance,
)
from fairseq_posenc.backends.blocked.spread import (
    BlockRows,
    KeyProducts,
    RowTable,
    SharedSpread,
    Spread,
    add_pairs,
)
from fairseq_posenc.backends.forward_cache import copy_if_kept


class Scores:
    """Computes the attention weights of a chunk, and adds up the gradients of its operands.

    The backward pass of a block (:mod:`~fairseq_posenc.backends.blocked.function`) calls
    ``compute_weights``, computes the softmax's gradient itself, and then calls
    ``add_temperature_gradient`` and ``add_gradients``; ``finish_gradients`` follows the last block.
    """

    def __init__(
        self, geometry: Geometry, settings: Settings, chunk: Chunk, operands: Operands
    ) -> None:
        self.geometry = geometry
        self.settings = settings
        self.chunk = chunk
        self.operands = operands

    def compute_weights(self, strip: Strip, saved_states: list[BlockState]) -> list[BlockState]:
        """Compute the weights of blocks that share a softmax; states may hold them, or be []."""
        states = []
        scores = []
        for block, state in zip(strip, saved_states or [BlockState() for _ in strip]):
            if self.operands.gain is not None:
                state = state._replace(gain=view_by_distance(self.operands.gain, block))
            if state.weights is None:
                state = self._compute_parts(block, state)
                masked, state = self._compute_scores(block, state)
                scores.append(masked)
            states.append(state)
        if not scores:  # the weights were saved: of all blocks, or of none
            return states
        weights = self._compute_softmax(scores)
        return [
            state._replace(weights=self._drop(block, weights.pop(0)))
            for block, state in zip(strip, states)
        ]

    def _compute_softmax(self, scores: list[Tensor]) -> list[Tensor]:
        """Turn the scores of blocks, ``(c, M, W)`` each, into weights, and empty the list."""
        widths = [x.size(2) for x in scores]
        sink = self.operands.sink
        if sink is not None:
            # It takes part in the softmax like one more key, and is cut off again.
            scores.append(sink[:, :, None].expand(-1, scores[0].size(1), -1))  # [c, M, 1]
        together = scores[0] if len(scores) == 1 else torch.cat(scores, -1)
        scores.clear()  # their memory is needed
        weights = together.softmax(-1)
        if weights.size(2) == widths[0]:
            return [weights]
        return list(weights[..., : sum(widths)].split(widths, -1))

    def _drop(self, block: Block, weights: Tensor) -> Tensor:
        """Mark the weights that dropout drops, ``(c, M, W)``."""
        query_seeds, key_seeds = self.operands.query_seeds, self.operands.key_seeds
        if query_seeds is None or key_seeds is None:
            return weights
        seeds = query_seeds[:, :, block.queries].transpose(0, 1), key_seeds[:, block.keys]
        return dropout.mark_dropped(weights, self.settings.dropout, *seeds)

    def prepare_rows(self, name: str, block: Block, side: int) -> BlockRows | None:
        """Prepare to multiply one side of a block with a table's rows; None without the table."""
        table = getattr(self.operands, name)
        row_index = getattr(self.operands, name_row_index(name))
        if table is None:
            return None
        if row_index is None:
            return Band(table, block, side, self.geometry.tile)
        lowest = 1 - self.geometry.src_len
        row_table = RowTable(table, row_index, self.settings.starts[name], lowest)
        if side == KEY_SIDE and self.key_products is not None:
            return SharedSpread(row_table, block, self.key_products)
        return Spread(row_table, block, side)

    @cached_property
    def key_products(self) -> KeyProducts | None:
        """The products of keys that blocks share; None if each block has few of the keys."""
        table = self.operands.key_table
        if self.geometry.visible or table is None or self.operands.key_row_index is None:
            return None
        rows = len(self.settings.starts["key_table"]) + 1
        return KeyProducts(self.operands.key, table[:, :rows])

    def finish_gradients(self, totals: Operands) -> None:
        """Add the gradients that the blocks of a chunk share, after the last of them."""
        if self.key_products is not None:
            self.key_products.add_gradients(totals.key, totals.key_table)

    def locate_reset(self, block: Block) -> ResetLines | None:
        """Locate the first token's scores in a block; None without a reset."""
        first = self.operands.first_token
        return None if first is None else ResetLines.locate(first, block, self.geometry.src_len)

    def add_gradients(
        self, block: Block, state: BlockState, grad: Tensor, totals: Operands
    ) -> None:
        """Add the gradients of the operands, given that of a block's scores, which is overwritten.

        Totals are None for operands that need no gradient.
        """
        operands = self.operands
        if totals.pair_bias is not None:
            total = block.select_pairs(totals.pair_bias)
            total += self.chunk.split_sentences(grad).sum_to_size(total.shape)
        rows = self.prepare_rows("state_table", block, QUERY_SIDE)
        if operands.states is not None and rows is not None:
            sums = rows.arrange_by_row(grad)
            if totals.states is not None:
                totals.states[:, block.queries].add_(rows.sum_weighted_rows(sums))
            rows.add_table_gradient(totals.state_table, sums, operands.states[:, block.queries])
        self._add_decay_gradients(block, grad, totals)
        if self.settings.folds:  # there are no other gradients of queries and keys
            self._add_table_gradients(block, state, grad, totals)
            return
        product = self.settings.product
        lines = self.locate_reset(block)
        query, key = operands.query[:, block.queries], operands.key[:, block.keys]
        content_grad = state.compute_gradient("content", grad, product)  # [c, M, W]
        # Where nothing multiplies a part, its gradient is that of the score, whatever the parts.
        reset_parts = (BlockState(), BlockState())
        if lines is not None and (product or operands.gain is not None):
            reset_parts = self._compute_reset_parts(block, state, lines)
            for line, line_parts in zip(lines, reset_parts):
                line_grad = line_parts.compute_gradient("content", line.select(grad), product)
                line.put(content_grad, line_grad)
        totals.query[:, block.queries].baddbmm_(content_grad, key)  # [c, M, D]
        totals.key[:, :, block.keys].baddbmm_(query.transpose(1, 2), content_grad)  # [c, D, W]
        if lines is not None:  # first, as it zeros the lines of `grad`: they have no distance
            self._add_reset_gradients(block, lines, reset_parts, grad, totals)
        self._add_table_gradients(block, state, grad, totals)

    def add_temperature_gradient(
        self, block: Block, state: BlockState, grad: Tensor, totals: Operands
    ) -> None:
        """Add the gradient of temperatures, and change ``grad`` in place.

        It becomes the gradient of the scores before a temperature and a cap.
        """
        if state.capped is not None:  # the derivative of C tanh(e / C) is 1 - tanh(e / C)^2
            grad.addcmul_(grad * state.capped, state.capped, value=-1)
        temperature = self.operands.temperature
        if temperature is None:
            return
        if totals.temperature is not None:
            # Such a call saves no blocks, so the scores have just been computed again.
            assert state.scores is not None
            totals.temperature[:, block.queries] += (grad * state.scores).sum(-1)
        grad.mul_(temperature[:, block.queries, None])

    def _compute_decay(self, block: Block) -> Tensor | None:
        """Compute the decay c_i - c_j of a block's pairs, ``(c, M, W)``, in the dtype of scores."""
        operands = self.operands
        pairs = (
            (operands.query_decay, operands.key_decay),
            (operands.query_later_decay, operands.key_later_decay),
        )
        decays = [
            _subtract(by_query[:, block.queries], by_key[:, block.keys], operands.query.dtype)
            for by_query, by_key in pairs
            if by_query is not None and by_key is not None
        ]
        if operands.is_later is None:
            return decays[0] if decays else None
        earlier, later = decays
        return torch.where(view_by_distance(operands.is_later, block), later, earlier)

    def _add_decay_gradients(self, block: Block, grad: Tensor, totals: Operands) -> None:
        """Add the gradients of the decay: sums over keys, and negative sums over queries."""
        operands = self.operands
        earlier_grad = grad
        if operands.is_later is not None:
            is_later = view_by_distance(operands.is_later, block)
            earlier_grad = grad.masked_fill(is_later, 0.0)
            if totals.query_later_decay is not None and totals.key_later_decay is not None:
                later_grad = grad - earlier_grad
                totals.query_later_decay[:, block.queries] += later_grad.sum(2)[..., None]
                totals.key_later_decay[:, block.keys] -= later_grad.sum(1)[..., None]
        if totals.query_decay is not None and totals.key_decay is not None:
            totals.query_decay[:, block.queries] += earlier_grad.sum(2)[..., None]
            totals.key_decay[:, block.keys] -= earlier_grad.sum(1)[..., None]

    def _add_table_gradients(
        self, block: Block, state: BlockState, grad: Tensor, totals: Operands
    ) -> None:
        """Add the gradients of all tables, and through them those of queries and keys."""
        operands = self.operands
        product = self.settings.product
        for total, name in ((totals.bias, "bias"), (totals.gain, "gain")):
            if total is not None:
                by_pair = state.compute_gradient(name, grad, product)  # [c, M, W]
                if total.size(0) == 1:
                    by_pair = by_pair.sum(0, keepdim=True)  # [1, M, W]
                total[:, block.distance_range].add_(sum_by_distance(by_pair))  # [G, M + W - 1]
        query_total, key_total = totals.query[:, block.queries], totals.key[:, :, block.keys]
        if self.settings.folds:
            tables = totals.query_table, totals.key_table
            folded.add_gradients(*self._fold(block), grad, (query_total, key_total), tables)
            return
        if (rows := self.prepare_rows("query_table", block, QUERY_SIDE)) is not None:
            sums = rows.arrange_by_row(state.compute_gradient("query_term", grad, product))
            query = operands.query[:, block.queries]
            rows.add_gradients(sums, query, query_total, totals.query_table)
        if (rows := self.prepare_rows("key_table", block, KEY_SIDE)) is not None:
            sums = rows.arrange_by_row(state.compute_gradient("key_term", grad, product))
            rows.add_gradients(sums, operands.key[:, block.keys], key_total, totals.key_table)

    def _add_reset_gradients(
        self,
        block: Block,
        lines: ResetLines,
        reset_parts: tuple[BlockState, BlockState],
        grad: Tensor,
        totals: Operands,
    ) -> None:
        """Move the reset's row and column out of ``grad``, and add the gradients of their terms."""
        operands = self.operands
        product = self.settings.product
        column_parts, row_parts = reset_parts
        column, row = lines.take(grad)

        def split_gradient(name: str) -> tuple[Tensor, Tensor]:  # [c, M, 1] and [c, 1, W]
            column_grad = column_parts.compute_gradient(name, column, product)
            return column_grad, row_parts.compute_gradient(name, row, product)

        for total, name in ((totals.bias, "bias"), (totals.gain, "gain")):
            if total is not None:
                column_sum, row_sum = (x.sum((1, 2)) for x in split_gradient(name))  # each [c]
                add_reset_rows(total, torch.stack([row_sum, column_sum], 1))  # [c, 2]
        if operands.query_table is not None:
            query = operands.query[:, block.queries]
            row_grads = lines.sum_by_member(*split_gradient("query_term"), QUERY_SIDE)  # [c, M, 2]
            rows = expand_reset_rows(operands.query_table, row_grads)  # [c, 2, D]
            totals.query[:, block.queries].baddbmm_(row_grads, rows)
            add_reset_rows(totals.query_table, row_grads.transpose(1, 2) @ query)
        if operands.key_table is not None:
            key = operands.key[:, block.keys]
            row_grads = lines.sum_by_member(*split_gradient("key_term"), KEY_SIDE)  # [c, W, 2]
            rows = expand_reset_rows(operands.key_table, row_grads)  # [c, 2, D]
            totals.key[:, :, block.keys].baddbmm_(rows.transpose(1, 2), row_grads.transpose(1, 2))
            add_reset_rows(totals.key_table, row_grads.transpose(1, 2) @ key)

    def _compute_reset_parts(
        self, block: Block, state: BlockState, lines: ResetLines
    ) -> tuple[BlockState, BlockState]:
        """Compute the parts of the reset's column, ``(c, M, 1)``, and row, ``(c, 1, W)``."""
        operands = self.operands
        column: dict[str, Tensor] = {}
        row: dict[str, Tensor] = {}
        if (table := operands.query_table) is not None:
            query = operands.query[:, block.queries]
            column["query_term"], row["query_term"] = lines.multiply(table, query, QUERY_SIDE)
        if (table := operands.key_table) is not None:
            key = operands.key[:, block.keys]
            column["key_term"], row["key_term"] = lines.multiply(table, key, KEY_SIDE)
        if state.content is not None:
            column["content"] = lines.reset_column.select(state.content)
            row["content"] = lines.reset_row.select(state.content)
        if operands.gain is not None:
            column["gain"] = lines.reset_column.select_number(operands.gain)
            row["gain"] = lines.reset_row.select_number(operands.gain)
        return BlockState(**column), BlockState(**row)

    def _compute_parts(self, block: Block, state: BlockState) -> BlockState:
        """Compute the missing parts of a block's scores, as if there were no reset."""
        if self.settings.folds:
            return BlockState(folded.compute_scores(*self._fold(block)))
        operands = self.operands
        query, key = operands.query[:, block.queries], operands.key[:, block.keys]
        content, query_term, key_term = state.content, state.query_term, state.key_term
        rows = self.prepare_rows("query_table", block, QUERY_SIDE)
        if query_term is None and rows is not None:
            query_term = rows.multiply(query)
            if self.settings.product and isinstance(query_term, Tensor):
                # It is read several times, so copy the view of tiles into contiguous memory once.
                query_term = query_term.flatten(1, 2)  # [c, M, W]
        rows = self.prepare_rows("key_table", block, KEY_SIDE)
        if key_term is None and rows is not None:
            key_term = rows.multiply(key)
        if content is None:
            content = copy_if_kept(query @ key.transpose(1, 2))  # [c, M, W]
        return BlockState(content, state.gain, query_term, key_term)

    def _fold(self, block: Block) -> tuple[FoldedSide, FoldedSide]:
        """Prepare both sides of a block for their product (:mod:`.folded`)."""
        query_spread = self.prepare_rows("query_table", block, QUERY_SIDE)
        key_spread = self.prepare_rows("key_table", block, KEY_SIDE)
        # `Settings.folds` is only set if both tables have rows that serve the same runs.
        assert isinstance(query_spread, Spread)
        assert isinstance(key_spread, Spread)
        query = FoldedSide(self.operands.query[:, block.queries], query_spread)
        return query, FoldedSide(self.operands.key[:, block.keys], key_spread)

    def _compute_scores(self, block: Block, parts: BlockState) -> tuple[Tensor, BlockState]:
        """Compute the masked scores; also return the parts with all that their gradient needs."""
        operands = self.operands
        product = self.settings.product
        lines = self.locate_reset(block)
        # Computed before combine(), which overwrites the content of a sum.
        reset = () if lines is None else self._compute_reset_parts(block, parts, lines)
        scores = parts.combine(product)
        if operands.bias is not None:
            scores.add_(view_by_distance(operands.bias, block))
        for line, line_parts in zip(lines or (), reset):
            line_scores = line_parts.combine(product)  # [c, M, 1] or [c, 1, W]
            if operands.bias is not None:
                line_scores = line_scores + line.select_number(operands.bias)
            line.put(scores, line_scores)
        if operands.pair_bias is not None:
            self.chunk.split_sentences(scores).add_(block.select_pairs(operands.pair_bias))
        rows = self.prepare_rows("state_table", block, QUERY_SIDE)
        if operands.states is not None and rows is not None:
            # States have the shape (c, M, width of a state).
            add_pairs(scores, rows.multiply(operands.states[:, block.queries]))
        if (decay := self._compute_decay(block)) is not None:
            scores.add_(decay)  # [c, M, W]
        before_temperature = capped = None
        if operands.temperature is not None:
            before_temperature = scores
            scores = scores * operands.temperature[:, block.queries, None]
        if (softcap := self.settings.softcap) is not None:
            capped = scores.div(softcap).tanh_()
            scores = capped * softcap
        if operands.distance_bias is not None:
            scores.add_(view_by_distance(operands.distance_bias, block))
        if operands.window_bias is not None and operands.first_keys is not None:
            is_exempt = operands.first_keys[:, None, block.keys]  # [c, 1, W]
            scores.add_(view_by_distance(operands.window_bias, block).masked_fill(is_exempt, 0.0))
        query_segments, key_segments = operands.query_segments, operands.key_segments
        if query_segments is not None and key_segments is not None:
            differs = query_segments[:, block.queries, None].ne(key_segments[:, None, block.keys])
            scores.masked_fill_(differs, FORBIDDEN)  # [c, M, W]
        if operands.mask_bias is not None:
            self.chunk.split_sentences(scores).add_(block.select_pairs(operands.mask_bias))
        return scores, parts._replace(scores=before_temperature, capped=capped)


def _subtract(query_sums: Tensor, key_sums: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute the difference of two running sums for each pair, ``(c, M, W)``.

    The first query's sum is subtracted from both first, part by part: sums grow with the position,
    and added up, a large one would lose the small differences between neighbours.

    Args:
        query_sums: of the queries, ``(c, M, parts)``.
        key_sums: of the keys, ``(c, W, parts)``.
        dtype: of the result.
    """
    anchor = query_sums[:, :1]  # [c, 1, parts]
    queries, keys = ((x - anchor).sum(-1).to(dtype) for x in (query_sums, key_sums))
    return queries[:, :, None] - keys[:, None]  # [c, M, W]
