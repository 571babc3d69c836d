"""The equation of attention, a block of queries at a time, in plain PyTorch.

Each block computes it for some heads and queries, and autograd differentiates it. Scores
exist for one block at a time and are computed again in the backward pass, together with the random
numbers of dropout: memory grows linearly with the length. Small calls save their blocks instead.
A single query is left to the reference, which is fast there. ``docs/blocked.md`` has pictures.
"""

import math

import torch
from torch import Tensor

from fairseq_posenc.backends import reference
from fairseq_posenc.backends.base import NEEDS_CONSECUTIVE_IDS, AttentionCall, no_reason
from fairseq_posenc.backends.blocked.function import Blocks, Computation
from fairseq_posenc.backends.blocked.geometry import split
from fairseq_posenc.backends.blocked.operands import lay_out
from fairseq_posenc.encodings.term import CountedRows, Decay, NumbersByPair, Reset, ScoreCap
from fairseq_posenc.precision import no_autocast
from fairseq_posenc.torch_modes import has_saving_hooks

unavailable = no_reason
# Bytes that a call may save for its backward pass; a call that would save more computes its blocks
# again. With every encoding, RoBERTa-base saves 11 sentences of 512 tokens (396 MiB for a product
# of three terms), and its 12 layers never save more than 4.7 GiB.
SAVED_BYTES = 400 * 2**20


def refuses(call: AttentionCall) -> str:
    """Explain why this backend cannot compute such terms; empty if it can."""
    terms, has_several_queries = call.terms, call.query.size(2) > 1
    if call.need_weights:
        return "it does not keep the attention weights"
    # Reset: other rows for pairs with the first token
    if terms.has(Reset) and call.mask.documents:
        return "it resets a single first token of each sentence, but each document has one"
    if terms.has(Reset) and terms.rows("value") is not None and has_several_queries:
        return "it does not reset rows of values"
    if terms.by_ids:  # tables by differences of position ids, not of token indices
        return NEEDS_CONSECUTIVE_IDS
    if terms.has(CountedRows):
        return "counted positions depend on all scores of a query"
    if terms.rows("channel") is not None and has_several_queries:
        return "no matrix product computes a gain for each channel"
    return ""


def attend(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    """Compute attended values ``(B, H, T, D)``, and no weights."""
    if call.query.size(2) == 1 or not call.query.numel():
        return reference.attend(call)
    with no_autocast(call.query.device):
        return _attend_blocks(call.with_all_heads()), None


def _attend_blocks(call: AttentionCall) -> Tensor:
    # These two tables keep rows that distances share, found by an index; all others repeat them.
    kept = ("query_table", "key_table")
    call = call._replace(terms=call.terms.expanded(lambda term: term.name not in kept))
    blocks = split(call)
    before, after = zip(*(block.far for block in blocks))  # by block, how many keys are far
    operands = lay_out(call, has_far=(any(before), any(after)))
    learns = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in operands)
    # No block is saved under hooks of checkpointing or offloading: they would get all its tensors.
    saves = learns and not has_saving_hooks() and _count_saved_bytes(call) <= SAVED_BYTES
    terms, bias = call.terms, call.terms.bias
    # Denormal weights are slow, so they become 0. Fixed biases (ALiBi's), which numbers by pair may
    # hold, and decay give them to far keys; trained biases by distance are assumed not to.
    is_fixed = bias is not None and not bias.table.requires_grad
    hides = call.mask.has_limits or call.mask.may_hide_all or call.mask.direction != "both"
    work = Computation(
        blocks,
        call.key.size(2),
        call.mask._replace(cache=None) if hides else None,  # autograd's graph must not keep a cache
        product=terms.product,
        softcap=terms.softcap,
        flushes=is_fixed or terms.has(NumbersByPair, Decay),
        dropout=call.dropout,
        saves=saves,
    )
    attended: Tensor = Blocks.apply(work, *operands).flip(2)  # blocks reverse the queries
    if call.dropout:
        attended.mul_(1 / (1 - call.dropout))  # blocks leave it out; `planner` refuses a rate of 1
    if call.mask.may_hide_all:  # padding or pairs may leave a query without any key: zeros
        visible = call.mask.count_visible(call.query.size(2), call.key.size(2), call.query.device)
        attended = attended.masked_fill(visible.eq(0)[:, None, :, None], 0.0)  # [B or 1, 1, T, 1]
    return attended.type_as(call.query)


def _count_saved_bytes(call: AttentionCall) -> int:
    """Count what the graphs of all blocks would save for pairs, operation by operation.

    Hidden pairs count: a call with a window saves blocks only where one without does.
    """
    terms, temperature = call.terms, call.temperature()
    numbers = 1 + int(terms.gain is not None)  # the weight; for a gain's gradient, the content
    if terms.product:  # a product for each pair; not counted: fewer, if distances share rows
        tables = terms.rows("query"), terms.rows("key")
        numbers += sum(x is not None and x.runs is None for x in tables)
    numbers += int(temperature is not None and temperature.requires_grad)  # the score without it
    numbers += int(terms.has(ScoreCap))  # the limited score
    numbers += int(terms.rows("value") is not None and call.dropout > 0)  # the kept weights
    pairs = math.prod(call.query.shape[:3]) * call.key.size(2)
    return numbers * pairs * torch.promote_types(call.query.dtype, torch.float32).itemsize
