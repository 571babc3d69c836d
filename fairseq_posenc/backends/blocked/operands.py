"""Lays out the tensors of a call as blocks use them, in float32 at least.

Queries are stored in reverse, so that distances grow with their index. B batch, H heads, T queries,
S keys, R distances, G tables (H, or 1 for all heads), U distinct rows of a table, D head size, W
width of a state.
"""

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from fairseq_posenc.backends.base import AttentionCall
from fairseq_posenc.backends.blocked.dropout import draw_seeds
from fairseq_posenc.backends.blocked.geometry import Block
from fairseq_posenc.encodings.term import ByDistance, NumbersByPair, SinkScore, States
from fairseq_posenc.precision import at_least_fp32


class Operands(NamedTuple):
    """The tensors of a call, or those of a block.

    Each field says its axes, of which any may be 1 for all. A block takes its part of B, H, T, S
    (keys), R (distances) and small letters. Keys beyond the ends of tables are far: b are a block's
    keys far before its queries, a those far after them, n the near ones, r their distances.

    A score begins as a sum, gain q.k + q.Q + k.K, or as a product, gain q.k q.Q k.K: q is the
    query, k the key, and Q and K are the rows of ``query_rows`` and ``key_rows`` for the pair. They
    contain the scale of the scores: in a sum q and K, in a product K or, without it, Q.
    """

    query: Annotated[Tensor, "BHTD"]
    key: Annotated[Tensor, "BHnD"]
    value: Annotated[Tensor, "BHSD"]
    # The keys once more, for far pairs (`Block.far`; none beside a gain or a reset), which share Q,
    # and K: the first row of each table, or the last. In a sum [k + Q, k.K], as q.k + q.Q + k.K =
    # [q, 1].[k + Q, k.K]; in a product (k.K) k.
    before_key: Annotated[Tensor | None, "BHbD"]
    after_key: Annotated[Tensor | None, "BHaD"]
    query_rows: Annotated[Tensor | None, "HUD"]  # distinct ones; HRD without an index
    query_index: Annotated[Tensor | None, "r"]  # which of U rows each distance has
    key_rows: Annotated[Tensor | None, "HUD"]
    key_index: Annotated[Tensor | None, "r"]
    state_rows: Annotated[Tensor | None, "HRW"]
    value_rows: Annotated[Tensor | None, "HRD"]
    gain_rows: Annotated[Tensor | None, "HR"]  # a number for each distance
    bias_rows: Annotated[Tensor | None, "HR"]
    # Of a reset: True for the first token, and for its pairs two rows of each table, with the
    # token as the query, and as the key.
    first_query: Annotated[Tensor | None, "BHTS"]  # (B or 1, 1, T, 1)
    first_key: Annotated[Tensor | None, "BHTS"]  # (B or 1, 1, 1, S)
    query_reset: Annotated[Tensor | None, "H2D"]
    key_reset: Annotated[Tensor | None, "H2D"]
    gain_reset: Annotated[Tensor | None, "H2"]
    bias_reset: Annotated[Tensor | None, "H2"]
    pair_bias: Annotated[Tensor | None, "BHTS"]
    states: Annotated[Tensor | None, "BHTW"]  # of queries, multiplied by `state_rows`
    temperature: Annotated[Tensor | None, "BHT1"]
    sink: Annotated[Tensor | None, "BH11"]
    query_decay: Annotated[Tensor | None, "BHTN"]  # the queries' decay, N numbers to add up
    key_decay: Annotated[Tensor | None, "BHSN"]
    later_query_decay: Annotated[Tensor | None, "BHTN"]  # for later keys, if not the same
    later_key_decay: Annotated[Tensor | None, "BHSN"]
    query_seeds: Annotated[Tensor | None, "BH2T"]  # of dropout, two for each query
    key_seeds: Annotated[Tensor | None, "BHS"]

    def axes(self) -> dict[str, str]:
        """Return the axes of each field in order: the annotated ones, but HRD without an index."""
        axes = {name: x.__metadata__[0] for name, x in Operands.__annotations__.items()}
        axes["query_rows"] = "HRD" if self.query_index is None else "HUD"
        axes["key_rows"] = "HRD" if self.key_index is None else "HUD"
        return axes

    def select(self, block: Block) -> "Operands":
        """Select the tensors of a block of a call, as leaves of a graph of the block alone."""
        return Operands._make(
            None if x is None else block.select(x, axes).detach().requires_grad_(x.requires_grad)
            for x, axes in zip(self, self.axes().values())
        )


def lay_out(call: AttentionCall, has_far: tuple[bool, bool]) -> Operands:
    """Lay out the tensors of a call; distances share rows only in tables of queries and of keys."""
    device, terms = call.query.device, call.terms
    (batch, heads, tgt_len, head_dim), src_len = call.query.shape, call.key.size(2)
    scale = terms.scale(head_dim)
    scaled = terms.rows("key") or (terms.rows("query") if terms.product else None)
    query = _reverse(call.query).contiguous()  # products of contiguous tensors are faster
    query = query if terms.product else query * scale
    key, value = (at_least_fp32(x).contiguous() for x in (call.key, call.value))
    found: dict[str, Tensor | None] = dict.fromkeys(Operands._fields)
    found["query"], found["key"], found["value"] = query, key, value
    distances = torch.arange(tgt_len + src_len - 1, device=device) - (src_len - 1)
    tables: dict[str, ByDistance | None] = {"gain": terms.gain, "bias": terms.bias}
    tables |= {of: terms.rows(of) for of in ("query", "key", "state", "value")}
    for name, term in tables.items():
        if term is None:
            continue
        rows = at_least_fp32(term.table)
        rows = rows * scale if term is scaled else rows
        if terms.first is not None:  # a reset: the last two rows; never of states or values
            rows, found[f"{name}_reset"] = rows[:, :-2], rows[:, -2:]
        if term.runs is not None:  # only of queries and of keys
            found[f"{name}_index"] = term.runs.find(distances)
        found[f"{name}_rows"] = rows.contiguous()
    if any(has_far):  # has_far: whether a block has keys far before its queries, or far after them
        of_query, of_key = found["query_rows"], found["key_rows"]
        for name, row, is_far in zip(("before_key", "after_key"), (0, -1), has_far):
            keys = key if is_far else key[:, :, :0]
            far_key = keys if of_query is None or terms.product else keys + of_query[:, row, None]
            if of_key is not None:
                # k.K, not by a matrix product, whose gradient autocast would round.
                numbers = (keys * of_key[:, row, None]).sum(-1, keepdim=True)
                far_key = keys * numbers if terms.product else torch.cat([far_key, numbers], -1)
            found[name] = far_key
    if (first := terms.first) is not None:  # [B or 1, S]
        found["first_query"] = first[:, None, src_len - tgt_len :, None].flip(2)
        found["first_key"] = first[:, None, None]
    if call.dropout:
        found["query_seeds"] = draw_seeds(batch, heads, 2, tgt_len, device=device)
        found["key_seeds"] = draw_seeds(batch, heads, src_len, device=device)
    if (by_pair := terms.find(NumbersByPair)) is not None:
        found["pair_bias"] = _reverse(by_pair.numbers)
    if (vectors := terms.find(States)) is not None:
        found["states"] = _reverse(vectors.vectors)
    if (factors := call.temperature()) is not None:
        found["temperature"] = _reverse(factors[..., None])
    if (score := terms.find(SinkScore)) is not None:
        found["sink"] = at_least_fp32(score.score)[None, :, None, None]
    for prefix, decay in zip(("", "later_"), call.decay()):  # for all or earlier keys; later ones
        if decay is not None:
            found[f"{prefix}query_decay"] = _reverse(decay[:, :, src_len - tgt_len :])
            found[f"{prefix}key_decay"] = decay
    return Operands._make(found.values())


def _reverse(x: Tensor) -> Tensor:
    """Reverse the queries of ``(..., T, n)``."""
    return at_least_fp32(x).flip(-2)
