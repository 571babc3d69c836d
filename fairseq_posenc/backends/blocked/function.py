"""Computes blocks of a call, each as a plain function that autograd differentiates.

The function of a block is the equation, with content and rows combined in place; see
:mod:`~fairseq_posenc.backends.equation`. The graphs of all blocks are kept for the backward pass,
or built again there, one by one, so that scores exist for one block at a time.

Shapes: k sentences and h heads of a block, M queries, W keys, D head size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fairseq_posenc.backends import equation
from fairseq_posenc.backends.base import refuse_second_order
from fairseq_posenc.backends.blocked import bands
from fairseq_posenc.backends.blocked.dropout import Weigh
from fairseq_posenc.backends.blocked.geometry import Block
from fairseq_posenc.backends.blocked.operands import Operands
from fairseq_posenc.mask import Mask
from fairseq_posenc.precision import no_autocast
from fairseq_posenc.torch_modes import copy_if_kept

HIDDEN = -1e38  # the score of a hidden pair, below any other, and finite: all keys may be hidden


@dataclass(frozen=True)
class Computation:
    """What blocks compute of a call's tensors.

    Attributes:
        blocks: they cover all queries.
        axes: those of each of the operands.
        src_len: the number of keys of the call.
        mask: the keys that queries may see; None for all.
        product: whether content and rows are multiplied, not added.
        softcap: the limit of the scores.
        flushes: whether weights may be denormal numbers, which become 0.
        dropout: the probability of dropping a weight.
        saves: whether the graphs of blocks are kept for the backward pass.
    """

    blocks: Sequence[Block]
    axes: Sequence[str]
    src_len: int
    mask: Mask | None
    product: bool
    softcap: float | None
    flushes: bool
    dropout: float
    saves: bool

    def list_blocks(
        self, device: torch.device, are_saved: bool = False
    ) -> Iterator[tuple[Block, Tensor | None]]:
        """Yield each block with its hidden pairs, ``(k or 1, 1, M, W)``; None for none needed."""
        mask, place, hidden = None if are_saved else self.mask, None, None
        for block in self.blocks:
            if mask is not None and place != (block.sentences, block.queries):
                place = block.sentences, block.queries  # the next blocks differ in heads alone
                of_sentences = mask.select_sentences(block.sentences)
                hidden = of_sentences.hides(*block.list_places(self.src_len, device))[:, None]
            yield block, hidden

    def attend(
        self,
        call: Operands,
        block: Block,
        hidden: Tensor | None,
        records: bool,
        sums: Tensor | None = None,
    ) -> tuple[Operands, Tensor]:
        """Compute the sums of values of a block, ``(k, h, M, D)``, not divided by the keep rate.

        Args:
            call: the tensors of the call.
            block: its places in the call.
            hidden: the pairs that are hidden; see :meth:`list_blocks`.
            records: whether autograd records a graph of the block alone, from its own tensors on.
            sums: the result, if it is known and only its graph is needed.

        Returns:
            The tensors of the block, which are the leaves of its graph, and the sums.
        """
        parts = block.select_all(call, self.axes)
        if records:
            parts = [
                None if whole is None else part.detach().requires_grad_(whole.requires_grad)
                for part, whole in zip(parts, call)
            ]
        x = Operands._make(parts)
        with torch.set_grad_enabled(records):
            scores = equation.score(
                self._multiply_tokens(x, block),
                biases=self._list_biases(x, block),
                temperature=x.temperature,
                softcap=self.softcap,
                add=Tensor.add_,
            )
            if hidden is not None:  # not recorded: hidden pairs have no weight, so no gradient
                scores.detach().masked_fill_(hidden, HIDDEN)
            if x.sink is not None:
                scores = torch.cat([scores, x.sink.expand(*scores.shape[:3], 1)], -1)
            known = sums if x.value_rows is None else None  # else they include sums of rows
            # Softmax, dropout and sums of values; `kept` are the weights that were not dropped.
            attended, kept = Weigh.apply(
                scores, self.flushes, self.dropout, x.query_seeds, x.key_seeds, known, x.value
            )
            if x.value_rows is not None:
                attended = attended + bands.sum_rows(kept, x.value_rows, x.value_index)
            return x, attended

    def _multiply_tokens(self, x: Operands, block: Block) -> Tensor:
        """Combine the content q_i.k_j, its gain and the products with rows: ``(k, h, M, W)``.

        The scale is in the operands already. Products have keys of their own for far pairs.
        """
        if x.before_key is None or x.after_key is None:
            return self._combine(x, block.widths)
        query, ends = x.query, (slice(1), slice(-1, None))
        # (q.k) (q.Q) (k.K) is the dot product of (q.Q) q and (k.K) k.
        before, after = (
            (query if x.query_rows is None else query * (query @ x.query_rows[:, end].mT)) @ key.mT
            for end, key in zip(ends, (x.before_key, x.after_key))
        )
        near = self._combine(x, (0, x.key.size(2), 0))
        return torch.cat([before, near, after], -1)

    def _combine(self, x: Operands, widths: tuple[int, int, int]) -> Tensor:
        """Combine all parts of the pairs of the block's keys; see ``bands.AddLookedUp``."""
        tables = [
            (bands.multiply_rows(tokens, rows, index, of_keys), tokens, index, of_keys, reset)
            for tokens, rows, index, of_keys, reset in (
                (x.query, x.query_rows, x.query_index, False, x.query_reset),
                (x.key, x.key_rows, x.key_index, True, x.key_reset),
            )
            if rows is not None
        ]

        def combine() -> Tensor:
            scores = copy_if_kept(x.query @ x.key.mT)
            if x.gain is not None:
                scores = scores * _view_numbers(x, x.gain, x.gain_reset)
            for found, tokens, index, of_keys, reset in tables:
                if index is not None and reset is None and not self.product:
                    scores = bands.AddLookedUp.apply(scores, found, index, of_keys, widths)
                    continue
                pairs = bands.look_up(found, index, of_keys)
                if reset is not None:
                    numbers = (tokens @ reset.mT).unbind(-1)  # two of each token, [k, h, M or W]
                    dim = -2 if of_keys else -1
                    pairs = _insert_reset(x, pairs, *(y.unsqueeze(dim) for y in numbers))
                scores = scores * pairs if self.product else scores.add_(pairs)
            return scores

        if not self.product:
            return combine()
        # The gradient of each factor needs the others, which are computed again.
        scores: Tensor = checkpoint(combine, use_reentrant=False, preserve_rng_state=False)
        return scores

    def _list_biases(self, x: Operands, block: Block) -> list[Tensor]:
        """List what is added to the scaled scores."""
        biases = [] if x.bias is None else [_view_numbers(x, x.bias, x.bias_reset)]
        if x.pair_bias is not None:
            biases.append(x.pair_bias)
        if x.state_rows is not None and x.states is not None:
            products = bands.multiply_rows(x.states, x.state_rows, x.state_index, of_keys=False)
            biases.append(bands.look_up(products, x.state_index, of_keys=False))
        if x.query_decay is not None and x.key_decay is not None:
            decay = equation.subtract_sums(x.query_decay, x.key_decay)
            if x.later_query_decay is not None and x.later_key_decay is not None:
                later = equation.subtract_sums(x.later_query_decay, x.later_key_decay)
                query_at, key_at = block.list_places(self.src_len, later.device)
                decay = torch.where(key_at > query_at, later, decay)
            biases.append(decay.to(x.query.dtype))
        return biases


class Blocks(torch.autograd.Function):
    """Computes all blocks, and adds up the gradients of what they share."""

    @staticmethod
    def forward(ctx: Any, work: Computation, *tensors: Tensor | None) -> Tensor:
        """Compute the sums of values ``(B, H, T, D)``; ``tensors`` are the operands."""
        call = Operands._make(tensors)
        batch, heads, queries, _ = call.query.shape
        # fairseq's `(T, B, C)` is a view of this.
        sums = call.value.new_empty(queries, batch, heads, call.value.size(3))
        sums = sums.permute(1, 2, 0, 3)  # [B, H, T, D]
        ctx.graphs = []
        for block, hidden in work.list_blocks(sums.device):
            graph = work.attend(call, block, hidden, records=work.saves)
            if work.saves:
                ctx.graphs.append(graph)
            block.select(sums, "BHTD").copy_(graph[1].detach())  # a view of the block's part
        ctx.work = work
        ctx.save_for_backward(sums, *tensors)
        return sums

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of the tensors."""
        refuse_second_order("blocked")
        work = ctx.work
        sums, *tensors = ctx.saved_tensors
        call = Operands._make(tensors)
        learns = [x is not None and x.requires_grad for x in tensors]
        totals = [torch.zeros_like(x) if y else None for x, y in zip(tensors, learns)]
        graphs, ctx.graphs = ctx.graphs[::-1], []  # a second backward pass computes them again
        for block, hidden in work.list_blocks(grad.device, are_saved=bool(graphs)):
            with no_autocast(grad.device):
                if graphs:
                    leaves, attended = graphs.pop()
                else:
                    known = block.select(sums, "BHTD")
                    leaves, attended = work.attend(call, block, hidden, True, known)
                learnt = [leaf for leaf, y in zip(leaves, learns) if y]  # in the order of `totals`
                grads = iter(torch.autograd.grad(attended, learnt, block.select(grad, "BHTD")))
            del attended, leaves, learnt  # their memory is needed
            for total in block.select_all(totals, work.axes):
                if total is not None:
                    total += next(grads)  # in place: these are views of the totals
        return None, *totals


def _view_numbers(x: Operands, numbers: Tensor, reset: Tensor | None) -> Tensor:
    """View numbers by distance as those of pairs, ``(1 or k, G, M, W)``."""
    pairs = numbers.unfold(1, numbers.size(1) - x.query.size(2) + 1, 1)[None]
    return pairs if reset is None else _insert_reset(x, pairs, *reset[..., None, None].unbind(1))


def _insert_reset(x: Operands, pairs: Tensor, of_query: Tensor, of_key: Tensor) -> Tensor:
    """Replace the numbers of the first token's pairs, as the query, and as the key."""
    assert x.first_query is not None
    assert x.first_key is not None
    return torch.where(x.first_query, of_query, torch.where(x.first_key, of_key, pairs))
