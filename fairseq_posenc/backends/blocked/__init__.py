"""Attention, a block of queries at a time, in plain PyTorch, with a hand-written backward pass.

Scores exist for one block at a time, and are computed again in the backward pass together with the
random numbers of dropout: memory grows linearly with the length. Small calls save their blocks
instead. The backend serves every term but a gain of channels and counted positions, and leaves
calls with a single query to the reference, which is fast there. ``docs/blocked.md`` has pictures.
"""

import torch
from torch import Tensor

from fairseq_posenc.backends import reference
from fairseq_posenc.backends.base import NEEDS_CONSECUTIVE_IDS, AttentionCall, CallFeatures
from fairseq_posenc.backends.blocked.dropout import draw_seeds
from fairseq_posenc.backends.blocked.function import BlockedAttention
from fairseq_posenc.backends.blocked.geometry import Geometry, Settings
from fairseq_posenc.backends.blocked.operands import (
    Operands,
    build_distance_mask,
    build_mask_bias,
    find_fully_masked,
    lay_out_decay,
    lay_out_segments,
    lay_out_softmax,
    lay_out_terms,
    lay_out_window,
)
from fairseq_posenc.encodings.precision import at_least_fp32, no_autocast
from fairseq_posenc.encodings.terms import Terms

# Bytes that a call may save for its backward pass; a call that would save more computes its blocks
# again. With every encoding, RoBERTa-base saves 8 sentences of 512 tokens (288 MiB for a product of
# three terms), and its 12 layers never save more than 3.75 GiB.
SAVED_BYTES = 320 * 2**20
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
    if terms.counted_table is not None:
        return "counted positions depend on all scores of a query"
    if terms.channel_gain is not None and call.tgt_len > 1:
        return "no matrix product computes a gain for each channel"
    return ""


def attend(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    """Compute a call; see :class:`~fairseq_posenc.backends.base.Backend`."""
    if call.query.size(2) == 1 or not call.query.numel():
        return reference.attend(call)
    with no_autocast(call.query.device):
        return _attend_blocks(call.with_all_heads()), None


def _attend_blocks(call: AttentionCall) -> Tensor:
    query, key, _, terms, mask, *_ = call
    # Gains and biases are read through views, which need a row for each distance.
    terms = terms.expanded("gain", "bias", *_find_long_tables(terms, key.size(2)))
    folds = terms.product and _can_fold(terms)
    if terms.product and not folds:
        terms = terms.expanded("query_table", "key_table")
    geometry = Geometry.from_call(query, key.size(2), mask, terms)
    settings, operands = _prepare(geometry, call._replace(terms=terms), folds)
    needs_grad = any(x is not None and x.requires_grad for x in operands)
    temperature = operands.temperature
    # The gradient of a temperature needs the scores, which are not saved.
    needs_scores = temperature is not None and temperature.requires_grad
    if torch.is_grad_enabled() and needs_grad and not needs_scores:
        fits = _count_saved_bytes(geometry, settings, operands) <= SAVED_BYTES
        settings = settings._replace(saves=fits)
    return BlockedAttention.apply(geometry, settings, *operands).type_as(query)


def _prepare(geometry: Geometry, call: AttentionCall, folds: bool) -> tuple[Settings, Operands]:
    """Collect the settings of a call, and lay out its operands; autograd records the latter."""
    query, key, value, terms, mask, dropout, _ = call
    operands = Operands(at_least_fp32(query), at_least_fp32(key), at_least_fp32(value))
    device = query.device
    terms, scale = _move_scale_to_table(terms, terms.scale(query.size(-1)))
    if dropout:
        batch, heads, (queries, keys) = geometry.batch, geometry.heads, geometry.padded
        operands = operands._replace(
            query_seeds=draw_seeds(batch, heads, 2, queries, device=device),
            key_seeds=draw_seeds(batch, heads, keys, device=device),
        )
    operands = operands._replace(
        **lay_out_terms(geometry, terms, mask),
        **lay_out_segments(geometry, mask),
        **lay_out_window(geometry, mask),
        **lay_out_softmax(geometry, call),
        **lay_out_decay(geometry, call),
        distance_bias=build_distance_mask(geometry, mask, device),
        mask_bias=build_mask_bias(mask, geometry, device),
        fully_masked=find_fully_masked(mask, geometry),
    )
    settings = Settings(
        product=terms.product and not folds,
        folds=folds,
        scale=scale,
        dropout=dropout,
        saves=False,  # the caller decides this by the size of the operands
        starts={name: runs.starts for name, runs in terms.runs.items()},
        softcap=terms.softcap,
    )
    return settings, operands


def _find_long_tables(terms: Terms, src_len: int) -> list[str]:
    """Find the tables that are faster if repeated to all distances (see :data:`MAX_ROWS_PER_KEY`).

    A table for each head is never one of them: repeating it takes too long.
    """
    return [
        name
        for name, term, table in terms.present()
        if name in terms.runs
        and terms.runs[name].num_rows > MAX_ROWS_PER_KEY * src_len
        and not term.per_head(table)
    ]


def _can_fold(terms: Terms) -> bool:
    """Check whether a product is one of scaled queries and keys (see :mod:`.folded`).

    A gain or a reset gives pairs other factors, although they share the row of both tables.
    """
    runs = terms.runs.get("query_table")
    same_runs = runs is not None and runs == terms.runs.get("key_table")
    return same_runs and terms.gain is None and terms.first is None


def _move_scale_to_table(terms: Terms, scale: float) -> tuple[Terms, float]:
    """Multiply a table by the scale if possible; also return the factor that the queries need.

    In a sum, scaled queries scale the content and the query term, so only the table of keys is left
    to be scaled. A product is scaled once. Without tables it is a plain dot product.
    """
    if terms.key_table is not None:
        terms = terms._replace(key_table=at_least_fp32(terms.key_table) * scale)
        return terms, 1.0 if terms.product else scale
    if terms.product and terms.query_table is not None:
        return terms._replace(query_table=at_least_fp32(terms.query_table) * scale), 1.0
    return terms._replace(product=False), scale


def _count_saved_bytes(geometry: Geometry, settings: Settings, operands: Operands) -> int:
    """Count the bytes that a call would save without its window and segments.

    So a window, which leaves fewer pairs, never makes a call save its blocks.
    """
    # As in BlockState.select_saved: of a product, the content and a term for each table; of a sum,
    # the weights, the content if it has a gain, and the scores if they are capped.
    of_product = (operands.query_table, operands.key_table)
    of_sum = (operands.gain, settings.softcap)
    tensors = 1 + sum(x is not None for x in (of_product if settings.product else of_sum))
    return tensors * geometry._replace(visible=()).pairs * operands.query.element_size()
