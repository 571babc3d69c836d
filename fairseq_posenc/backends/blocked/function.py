"""Computes blocks of a call, each as a plain function that autograd differentiates.

Scores follow :mod:`~fairseq_posenc.backends.equation`, whose terms are added in place. Graphs of
blocks are kept for the backward pass, or built again there. Queries are reversed: the distance of
query i and key j is i + j + the lowest. A *reset* gives pairs of first tokens numbers of their own.
Keys are *far* if all their pairs have the first, or the last, row of each table; others are near.

Shapes: k sentences, h heads, M queries, W keys of a block, D head size; ``Operands`` has the axes
of each field. The ``*_rows`` of a table are by distance, unless ``*_index`` has the row of each.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
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

HIDDEN = -1e38  # score of a hidden pair, in float32 or more; finite, as a query may see no key


@dataclass(frozen=True)
class Computation:
    """What blocks compute of a call's tensors."""

    blocks: Sequence[Block]  # they cover all queries
    src_len: int  # the number of keys of the call
    mask: Mask | None  # the keys that queries may see; None for all
    product: bool  # whether content and rows are multiplied, not added
    softcap: float | None  # the limit of the scores
    flushes: bool  # whether tiny weights become 0, since denormal numbers are slow
    dropout: float  # the probability of dropping a weight
    saves: bool  # whether the graphs of blocks are kept for the backward pass

    def list_blocks(
        self, device: torch.device, with_hidden: bool = True
    ) -> Iterator[tuple[Block, Tensor | None]]:
        """Yield each block with its hidden pairs, ``(k or 1, 1, M, W)``, or None without a mask."""
        place, hidden = None, None  # of the block before, which often differs in heads alone
        for block in self.blocks:
            if self.mask is not None and with_hidden and place != (block.sentences, block.queries):
                place = block.sentences, block.queries
                of_sentences = self.mask.select_sentences(block.sentences)
                query_at, key_at = block.list_places(self.src_len, device)  # indices of tokens
                hidden = of_sentences.hides(query_at, key_at)[:, None]
            yield block, hidden

    def attend(
        self, x: Operands, block: Block, hidden: Tensor | None, sums: Tensor | None = None
    ) -> Tensor:
        """Compute the sums of values of a block, ``(k, h, M, D)``; callers divide by 1 - dropout.

        ``hidden``: see :meth:`list_blocks`; ``sums``: this result, if only its graph is needed.
        """
        with torch.set_grad_enabled(self.saves or sums is not None):
            scores = equation.score(  # `scale` is in the operands, and rows are in the content
                self._multiply_tokens(x),
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
                attended = attended + bands.sum_rows(kept, x.value_rows)
            return attended

    def _multiply_tokens(self, x: Operands) -> Tensor:
        """Combine the content q_i.k_j, its gain and the products with rows: ``(k, h, M, W)``."""
        if x.before_key is None or x.after_key is None:  # no keys are far (beyond tables' ends)
            return self._combine(x)
        far = x.before_key, x.after_key
        return self._multiply_far(x, *far) if self.product else self._add_far(x, *far)

    def _multiply_far(self, x: Operands, before: Tensor, after: Tensor) -> Tensor:
        """Multiply far keys, stored as (k.K) k, by (q.Q) q, which gives (q.k) (q.Q) (k.K)."""
        first, last = x.query, x.query  # for keys far before, which have the first row Q, and after
        if x.query_rows is not None:  # distinct rows: the first and the last serve far keys
            numbers = x.query @ x.query_rows[:, [0, -1]].mT  # q.Q of both, [k, h, M, 2]
            first, last = (x.query * y for y in numbers.split(1, -1))
        return torch.cat([first @ before.mT, self._combine(x), last @ after.mT], -1)

    def _add_far(self, x: Operands, before: Tensor, after: Tensor) -> Tensor:
        """Multiply all keys at once, as `torch.cat` would copy scores; add rows of near keys."""
        # Far keys are stored as k + Q, with k.K as one more column if there is a table K: queries
        # get a 1 there, so that the product adds it, and near keys a 0.
        more = before.size(3) - x.key.size(3)  # columns: 1 or 0
        parts = [before, F.pad(x.key, (0, more)) if more else x.key, after]
        keys = torch.cat(parts, 2).mT
        address = keys.data_ptr()  # also of the view (k * h, D, W) that autograd saves for `@`
        with saved_tensors_hooks(  # that view is not saved, but made again from the parts
            lambda saved: None if saved.data_ptr() == address else saved,
            lambda saved: torch.cat(parts, 2).flatten(0, 1).mT if saved is None else saved,
        ):
            scores = (F.pad(x.query, (0, more), value=1.0) if more else x.query) @ keys
        scores = copy_if_kept(scores)  # checkpointing may keep them, and they change in place below
        near = scores.narrow(3, before.size(2), x.key.size(2))  # a view
        for numbers in _look_up(x, *_multiply_rows(x)):  # no gain and no reset beside far keys
            near.add_(numbers)
        return scores

    def _combine(self, x: Operands) -> Tensor:
        """Combine content, gain and products with rows of near pairs; `attend` adds the rest."""
        of_queries, of_keys = _multiply_rows(x)  # not in `combine`, which checkpointing runs twice

        def combine() -> Tensor:
            qk = copy_if_kept(x.query @ x.key.mT)  # `equation` may add to it in place
            gain = None if x.gain_rows is None else _view_numbers(x, x.gain_rows, x.gain_reset)
            rows = _look_up(x, of_queries, of_keys)
            return equation.score(qk, rows, product=self.product, gain=gain, add=Tensor.add_)

        if not self.product:
            return combine()
        # The gradient of each factor needs the others, which are computed again.
        scores: Tensor = checkpoint(combine, use_reentrant=False, preserve_rng_state=False)
        return scores

    def _list_biases(self, x: Operands, block: Block) -> list[Tensor]:
        """List what is added to the scores, which are scaled already."""
        biases = [] if x.bias_rows is None else [_view_numbers(x, x.bias_rows, x.bias_reset)]
        if x.pair_bias is not None:
            biases.append(x.pair_bias)
        if x.state_rows is not None and x.states is not None:  # no index: products are by pair
            biases.append(bands.multiply_rows(x.states, x.state_rows, index=None, of_keys=False))
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
        sums = call.value.new_empty(queries, batch, heads, call.value.size(3))
        sums = sums.permute(1, 2, 0, 3)  # [B, H, T, D]; fairseq's `(T, B, C)` is a view of it
        ctx.graphs = []
        for block, hidden in work.list_blocks(sums.device):
            leaves = call.select(block)
            attended = work.attend(leaves, block, hidden)
            if work.saves:  # a graph: its leaves and its result
                ctx.graphs.append((leaves, attended))
            block.select(sums, "BHTD").copy_(attended.detach())  # a view of the block's part
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
        totals: dict[str, Tensor] = {}  # of the blocks' gradients, by the operand's name
        for name, x in call._asdict().items():
            if x is not None and x.requires_grad:  # gradients of keys and values come transposed
                is_transposed = name.endswith(("key", "value"))
                totals[name] = x.new_zeros(x.mT.shape).mT if is_transposed else torch.zeros_like(x)
        axes = call.axes()
        graphs, ctx.graphs = ctx.graphs, []  # a second backward pass builds them again
        for block, hidden in work.list_blocks(grad.device, with_hidden=not graphs):
            with no_autocast(grad.device):  # as in the forward pass (`blocked.attend`)
                if graphs:
                    leaves, attended = graphs.pop(0)
                else:
                    leaves = call.select(block)
                    attended = work.attend(leaves, block, hidden, block.select(sums, "BHTD"))
                inputs = [getattr(leaves, name) for name in totals]
                grads = torch.autograd.grad(attended, inputs, block.select(grad, "BHTD"))
            del attended, leaves, inputs  # frees their memory for the next block
            for (name, total), block_grad in zip(totals.items(), grads):
                block.select(total, axes[name]).add_(block_grad)  # in a view of the block's part
        return None, *(totals[x].contiguous() if x in totals else None for x in call._fields)


def _multiply_rows(x: Operands) -> tuple[Tensor | None, Tensor | None]:
    """Multiply queries and keys by the rows of their tables; :func:`_look_up` takes the results."""
    of_queries, of_keys = None, None  # no table
    if x.query_rows is not None:
        of_queries = bands.multiply_rows(x.query, x.query_rows, x.query_index, of_keys=False)
    if x.key_rows is not None:
        of_keys = bands.multiply_rows(x.key, x.key_rows, x.key_index, of_keys=True)
    return of_queries, of_keys


def _look_up(x: Operands, of_queries: Tensor | None, of_keys: Tensor | None) -> Iterator[Tensor]:
    """Look up the products of near pairs, one table after the other, ``(k, h, M, W)``."""
    if of_queries is not None:
        pairs = bands.look_up(of_queries, x.query_index, of_keys=False)
        if x.query_reset is not None:
            pairs = _insert_reset(x, pairs, (x.query @ x.query_reset.mT).unsqueeze(3))
        yield pairs
    if of_keys is not None:
        pairs = bands.look_up(of_keys, x.key_index, of_keys=True)
        if x.key_reset is not None:
            pairs = _insert_reset(x, pairs, (x.key @ x.key_reset.mT).unsqueeze(2))
        yield pairs


def _view_numbers(x: Operands, numbers: Tensor, reset: Tensor | None) -> Tensor:
    """View numbers by distance, ``(G, M + W - 1)``, as those of pairs, ``(1 or k, G, M, W)``."""
    pairs = numbers.unfold(1, numbers.size(1) - x.query.size(2) + 1, 1)[None]
    return pairs if reset is None else _insert_reset(x, pairs, reset[:, None, None])


def _insert_reset(x: Operands, pairs: Tensor, numbers: Tensor) -> Tensor:
    """Replace the numbers of the first token's pairs by two, ``(..., M or 1, W or 1, 2)``."""
    as_query, as_key = numbers.unbind(-1)  # of the token as the query of a pair, and as its key
    assert x.first_query is not None
    assert x.first_key is not None
    return torch.where(x.first_query, as_query, torch.where(x.first_key, as_key, pairs))
