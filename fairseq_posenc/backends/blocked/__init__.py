"""Attention, a block of queries at a time, in plain PyTorch.

Each block computes the equation for some heads and queries, and autograd differentiates it. Scores
exist for one block at a time and are computed again in the backward pass, together with the random
numbers of dropout: memory grows linearly with the length. Small calls save their blocks instead.
Calls with a single query are left to the reference, which is fast there. ``docs/blocked.md`` has
pictures.
"""

import math

import torch
from torch import Tensor

from fairseq_posenc.backends import reference
from fairseq_posenc.backends.base import NEEDS_CONSECUTIVE_IDS, AttentionCall, CallFeatures
from fairseq_posenc.backends.blocked import geometry
from fairseq_posenc.backends.blocked.dropout import compute_kept_factor
from fairseq_posenc.backends.blocked.function import Blocks, Computation
from fairseq_posenc.backends.blocked.geometry import Block, Geometry, Part
from fairseq_posenc.backends.blocked.operands import Operands, lay_out, separate_first
from fairseq_posenc.backends.forward_cache import is_saving_hooked
from fairseq_posenc.backends.mask import Mask
from fairseq_posenc.encodings.precision import no_autocast
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
    if terms.first is not None and call.documents:
        return "it resets a single first token of each row, but each document has one"
    if terms.by_ids:
        return NEEDS_CONSECUTIVE_IDS
    if terms.counted_table is not None and (terms.product or terms.first is not None):
        return "it counts positions by scores that are neither a product nor reset"
    if terms.channel_gain is not None and call.tgt_len > 1:
        return "no matrix product computes a gain for each channel"
    return ""


def attend(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    """Compute a call; see :class:`~fairseq_posenc.backends.base.Backend`."""
    if call.query.size(2) == 1 or not call.query.numel():
        return reference.attend(call)
    with no_autocast(call.query.device):
        return _attend_blocks(call.with_all_heads()), None


def choose_blocks(call: AttentionCall) -> tuple[Geometry, list[Block]]:
    """Choose the blocks of a call."""
    call = _expand_terms(call)
    query, terms, mask = call.query, call.terms, call.mask
    batch, heads, tgt_len, _ = query.shape
    src_len = call.key.size(2)
    tables = [(name, term, x) for name, term, x in terms.present() if term.rows is not None]
    tile = 1
    if any(term.has_vectors and name not in terms.runs for name, term, _ in tables):
        # Each query (or key) is multiplied with N - 1 table rows that it does not need, so small
        # tiles waste little; but tiles that are too small make slow matrix products.
        tile = 16 if src_len < 128 else 64
    # On a CPU a block's pairs should stay in the caches, and occupy all threads. A GPU needs work
    # for all of its processors at once.
    threads = torch.get_num_threads()
    on_cpu = query.device.type == "cpu"
    near = geometry.find_near([runs.starts for runs in terms.runs.values()], src_len)
    sizes = Geometry(
        batch,
        heads,
        tgt_len,
        src_len,
        tile,
        per_head=any(term.per_head(x) for _, term, x in tables),
        pairs_of_block=geometry.PAIRS_PER_THREAD * threads if on_cpu else geometry.PAIRS_ON_GPU,
        limited=mask.locality.limits,
        near=None if terms.counted_table is not None else near,
    )
    deps = (*mask.cache_deps, sizes, query.device)
    blocks = mask.cached("blocks", deps, lambda: sizes.split(mask, query.device))
    if terms.counted_table is not None:  # positions are counted over all keys of a query
        joined = [slice(block[0].keys.start, block[-1].keys.stop) for block in blocks]
        blocks = [(block[0]._replace(keys=keys),) for block, keys in zip(blocks, joined)]
    return sizes, blocks


def count_pairs(call: AttentionCall) -> int:
    """Count the pairs of queries and keys in the blocks of a call."""

    def size(part: Part) -> int:
        places = (part.sentences, part.heads, part.queries, part.keys)
        return math.prod(place.stop - place.start for place in places)

    return sum(size(part) for block in choose_blocks(call)[1] for part in block)


def _expand_terms(call: AttentionCall) -> AttentionCall:
    """Repeat the rows of tables to all distances where that is needed, or faster.

    Gains and biases are read through views, which need a row for each distance. A table for each
    head is never repeated for speed: that takes too long.
    """
    terms = call.terms
    long = [
        name
        for name, term, table in terms.present()
        if name in terms.runs
        and terms.runs[name].num_rows > MAX_ROWS_PER_KEY * call.key.size(2)
        and not term.per_head(table)
    ]
    return call._replace(terms=terms.expanded("gain", "bias", *long))


def _attend_blocks(call: AttentionCall) -> Tensor:
    call = _expand_terms(call)
    terms, mask = call.terms, call.mask
    sizes, blocks = choose_blocks(call)
    operands = lay_out(call, sizes)
    single = None
    if terms.first is not None:
        operands, single = separate_first(operands, call, sizes)
        blocks = [(*block, block[0]._replace(keys=slice(0, 1), of_first=True)) for block in blocks]
    attended = _compute(call, blocks, operands, sizes)[:, :, : sizes.tgt_len].flip(2)
    if single is not None and terms.first is not None:
        of_single = sizes._replace(
            tgt_len=1, src_len=sizes.padded[1], tile=1, limited=False, near=None
        )
        chunks = of_single.split(Mask(), call.query.device)
        row = _compute(call, chunks, single, of_single)
        is_first = terms.first[:, None, sizes.src_len - sizes.tgt_len :, None]  # [B or 1, 1, T, 1]
        attended = torch.where(is_first, row, attended)
    if call.dropout:
        attended = attended * compute_kept_factor(call.dropout)
    if mask.may_hide_all:
        counts = mask.count_visible(sizes.tgt_len, sizes.src_len, attended.device)  # [B or 1, T]
        attended = attended.masked_fill(counts.eq(0)[:, None, :, None], 0.0)
    return attended.type_as(call.query)


def _compute(
    call: AttentionCall, blocks: list[Block], operands: Operands, sizes: Geometry
) -> Tensor:
    """Compute blocks; their graphs are saved if they are small."""
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in operands.tensors)
    # A call with a window saves its blocks only where one without does. Hooks on saved tensors
    # would not see that the graphs of blocks are dropped, or offload them one by one.
    fits = _count_numbers(call) * sizes.all_pairs * operands.queries["query"].element_size()
    work = Computation(
        blocks,
        operands.emptied(),
        product=call.terms.product,
        softcap=call.terms.softcap,
        dropout=call.dropout,
        saves=learns and fits <= SAVED_BYTES and not is_saving_hooked(),
    )
    sums: Tensor = Blocks.apply(work, *operands.tensors)
    return sums


def _count_numbers(call: AttentionCall) -> int:
    """Count the numbers of each pair that the graph of a block saves."""
    terms = call.terms
    tables = sum(x is not None for x in (terms.query_table, terms.key_table))
    numbers = 1  # the weight
    if terms.product and tables:
        numbers += 1 + tables
    elif terms.gain is not None:
        numbers += 1
    temperature = call.terms.temperature if terms.log_visible is None else terms.log_visible
    numbers += temperature is not None and temperature.requires_grad
    numbers += terms.softcap is not None
    numbers += terms.value_table is not None and call.dropout > 0
    return numbers + 8 * (terms.counted_table is not None)
