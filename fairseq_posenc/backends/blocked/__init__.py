"""Attention, a block of queries at a time, in plain PyTorch.

Each block computes the equation for some heads and queries, and autograd differentiates it. Scores
exist for one block at a time and are computed again in the backward pass, together with the random
numbers of dropout: memory grows linearly with the length. Small calls save their blocks instead.
Calls with a single query are left to the reference, which is fast there. ``docs/blocked.md`` has
pictures.
"""

import torch
from torch import Tensor

from fairseq_posenc.backends import reference
from fairseq_posenc.backends.base import NEEDS_CONSECUTIVE_IDS, AttentionCall, CallFeatures
from fairseq_posenc.backends.blocked import geometry
from fairseq_posenc.backends.blocked.dropout import compute_kept_factor
from fairseq_posenc.backends.blocked.function import Blocks, Computation
from fairseq_posenc.backends.blocked.geometry import Block, Geometry
from fairseq_posenc.backends.blocked.operands import find_tables, find_uncommon, lay_out
from fairseq_posenc.backends.forward_cache import is_saving_hooked
from fairseq_posenc.encodings.precision import no_autocast
from fairseq_posenc.encodings.term import (
    ByDistance,
    CountedRows,
    NumbersByDistance,
    Reset,
    RowsByDistance,
    ScoreCap,
)
from fairseq_posenc.encodings.terms import Terms

# Bytes that a call may save for its backward pass; a call that would save more computes its blocks
# again. With every encoding, RoBERTa-base saves 8 sentences of 512 tokens (384 MiB for a product of
# three terms), and its 12 layers never save more than 4.7 GiB.
SAVED_BYTES = 400 * 2**20
# A table whose distinct rows are more than this share of the number of keys is repeated to all
# distances: multiplying tiles with the rows they need is then faster than multiplying every token
# with every row (measured).
MAX_ROWS_PER_KEY = 2 / 3


def unavailable() -> str:
    """Return "": it is always available."""
    return ""


def refuses(terms: Terms, call: CallFeatures) -> str:
    """Explain why this backend cannot compute such terms; empty if it can."""
    if call.need_weights:
        return "it does not keep the attention weights"
    if terms.has(Reset) and call.documents:
        return "it resets a single first token of each row, but each document has one"
    if terms.has(Reset) and terms.rows("value") is not None and call.tgt_len > 1:
        return "it does not reset rows of values"
    if terms.by_ids:
        return NEEDS_CONSECUTIVE_IDS
    if terms.has(CountedRows):
        return "counted positions depend on all scores of a query"
    if terms.rows("channel") is not None and call.tgt_len > 1:
        return "no matrix product computes a gain for each channel"
    return ""


def attend(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    """Compute a call; see :class:`~fairseq_posenc.backends.base.Backend`."""
    if call.query.size(2) == 1 or not call.query.numel():
        return reference.attend(call)
    with no_autocast(call.query.device):
        return _attend_blocks(call.with_all_heads()), None


def choose_blocks(call: AttentionCall) -> tuple[AttentionCall, Geometry, list[Block]]:
    """Choose the blocks of a call; also return the call with expanded tables, and its sizes."""
    call = _expand_terms(call)
    query, terms, mask = call.query, call.terms, call.mask
    batch, heads, tgt_len, _ = query.shape
    src_len = call.key.size(2)
    tables = [term for term in terms if isinstance(term, ByDistance)]
    tile = 1  # nothing is padded, without vectors by distance or with shared ones alone
    if any(isinstance(x, RowsByDistance) and x.runs is None for x in tables):
        # In a tile of N, each query (or key) is multiplied with N - 1 rows that it does not need:
        # small tiles waste little; but tiles that are too small make slow matrix products.
        tile = 16 if src_len < 128 else 64
    # On a CPU a block's pairs should stay in the caches, and occupy all threads. A GPU needs work
    # for all of its processors at once.
    pairs_of_block = geometry.PAIRS_ON_GPU
    if query.device.type == "cpu":
        pairs_of_block = geometry.PAIRS_PER_THREAD * torch.get_num_threads()
    # Only of tables with shared rows alone are products with far rows part of the content.
    near = None
    if tile == 1 and terms.gain is None and terms.first is None:
        multiplied = [terms.rows("query"), terms.rows("key")]
        starts = [x.runs.starts for x in multiplied if x is not None and x.runs is not None]
        near = geometry.find_near(starts, src_len)
    sizes = Geometry(
        batch,
        heads,
        tgt_len,
        src_len,
        tile,
        per_head=any(table.per_head for table in tables),
        pairs_of_block=pairs_of_block,
        near=near,
    )
    deps = (*mask.cache_deps, sizes, query.device)
    return call, sizes, mask.cached("blocks", deps, lambda: sizes.split(mask, query.device))


def _expand_terms(call: AttentionCall) -> AttentionCall:
    """Repeat the rows of tables to all distances where that is needed, or faster.

    Gains and biases are read through views, which need a row for each distance. A table for each
    head is never repeated for speed: that takes too long.
    """

    def select(term: ByDistance) -> bool:
        if isinstance(term, NumbersByDistance) or term.runs is None:
            return True
        is_long = term.runs.num_rows > MAX_ROWS_PER_KEY * call.key.size(2)
        return is_long and not term.per_head

    return call._replace(terms=call.terms.expanded(select))


def _attend_blocks(call: AttentionCall) -> Tensor:
    call, sizes, blocks = choose_blocks(call)
    operands = lay_out(call, sizes)
    learns = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in operands)
    # Hidden pairs count: a call with a window saves blocks only where one without does. Under hooks
    # on saved tensors none does: they would not see that graphs are dropped, or offload each alone.
    fits = _count_numbers(call, sizes, blocks) * operands.query.element_size() <= SAVED_BYTES
    work = Computation(
        blocks,
        sizes,
        {name for name, table in find_tables(call.terms).items() if table.runs is not None},
        find_uncommon(call.mask),
        product=call.terms.product,
        softcap=call.terms.softcap,
        dropout=call.dropout,
        saves=learns and fits and not is_saving_hooked(),
    )
    sums: Tensor = Blocks.apply(work, *operands)
    attended = sums[:, :, : sizes.tgt_len].flip(2)  # the last query was stored first
    if call.dropout:
        attended = attended * compute_kept_factor(call.dropout)  # which blocks leave out
    if call.mask.may_hide_all:
        visible = call.mask.count_visible(sizes.tgt_len, sizes.src_len, attended.device)
        attended = attended.masked_fill(visible.eq(0)[:, None, :, None], 0.0)  # [B or 1, 1, T, 1]
    return attended.type_as(call.query)


def _count_numbers(call: AttentionCall, sizes: Geometry, blocks: list[Block]) -> int:
    """Count the numbers that the graphs of all blocks save for pairs, operation by operation."""
    terms, temperature = call.terms, call.temperature()
    tables = [rows for of in ("query", "key") if (rows := terms.rows(of)) is not None]
    numbers = 1  # of each pair: the weight
    numbers += terms.gain is not None and not (terms.product and tables)  # the content
    numbers += temperature is not None and temperature.requires_grad  # the score
    numbers += terms.has(ScoreCap) + (terms.rows("value") is not None and call.dropout > 0)
    if not (terms.product and tables):
        return numbers * sizes.all_pairs
    # Pairs with a factor for each table, beside the content.
    near = sum(block.count_pairs(block.near) for block in blocks)
    factored = sizes.all_pairs if sizes.near is None else near
    return numbers * sizes.all_pairs + (1 + len(tables)) * factored
