"""Attention a block of queries at a time, in plain PyTorch, with a hand-written backward pass.

Scores exist for one block at a time, and are computed again in the backward pass together with the
random numbers of dropout: memory grows linearly with the length. Calls that can afford it keep
their blocks instead. Serves every term but a gain of channels and counted positions. The reference
computes calls with a single query, for which it is fast. ``docs/blocked.md`` has pictures.
"""

import torch
from torch import Tensor

from fairseq_posenc.backends import reference
from fairseq_posenc.backends.base import (
    NOT_BY_PLACE,
    AttentionCall,
    CallFeatures,
    score_scale,
)
from fairseq_posenc.backends.blocked.dropout import draw_seeds
from fairseq_posenc.backends.blocked.function import BlockedAttention
from fairseq_posenc.backends.blocked.geometry import Geometry, Rule
from fairseq_posenc.backends.blocked.operands import (
    Operands,
    build_distance_mask,
    build_mask_bias,
    find_fully_masked,
    lay_out_decay,
    lay_out_segments,
    lay_out_softmax,
    lay_out_tables,
    lay_out_window,
    reverse_queries,
)
from fairseq_posenc.backends.blocked.reset import find_first_tokens
from fairseq_posenc.encodings.precision import at_least_fp32
from fairseq_posenc.encodings.terms import Terms

# Bytes that a call may save for its backward pass; a call that would save more computes its blocks
# again. With every encoding, RoBERTa-base saves 8 sentences of 512 tokens (288 MiB for a product of
# three terms), and its 12 layers never save more than 3.75 GiB.
SAVED_BYTES = 320 * 2**20
# Up to so many rows for each key, each row of a table is multiplied once (measured). A longer table
# is repeated to all distances: its products by tiles are fewer.
ROWS_PER_KEY = 2 / 3


def unavailable() -> str:
    """Return "": it is always available."""
    return ""


def refuses(terms: Terms, call: CallFeatures) -> str:
    """Explain why this backend cannot compute such terms; empty if it can."""
    if call.need_weights:
        return "it does not keep the attention weights"
    if terms.first is not None and call.documents:
        return "it resets one first token in a row, and each document has one"
    if terms.by_ids:
        return NOT_BY_PLACE
    if terms.counted_table is not None:
        return "counted positions depend on all scores of a query"
    if terms.channel_gain is not None and call.tgt_len > 1:
        return "no matrix product computes a gain for each channel"
    return ""


def attend(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    """Compute a call; see :class:`~fairseq_posenc.backends.base.Backend`."""
    call = call.with_all_heads()
    query, key, _, terms, mask, *_ = call
    terms = terms.expanded("gain", "bias", *_find_long_tables(terms, key.size(2)))
    if terms.product and not _can_fold(terms):
        terms = terms.expanded("query_table", "key_table")
    if query.size(2) == 1 or not query.numel():
        return reference.attend(call)
    if torch.is_autocast_enabled(query.device.type):
        with torch.autocast(query.device.type, enabled=False):
            return attend(call)
    geometry = Geometry.from_call(query, key.size(2), mask, terms)
    rule, operands = _prepare_operands(geometry, call._replace(terms=terms))
    learns = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in operands)
    temperature = operands.temperature
    # The gradient of a temperature takes the scores, which are not saved.
    if learns and (temperature is None or not temperature.requires_grad):
        fits = _count_saved_bytes(geometry, rule, operands) <= SAVED_BYTES
        rule = rule._replace(saves=fits)
    return BlockedAttention.apply(geometry, rule, *operands).type_as(query), None


def _prepare_operands(geometry: Geometry, call: AttentionCall) -> tuple[Rule, Operands]:
    """Lay out the operands, and make the rule; autograd records it."""
    operands = Operands(*map(at_least_fp32, call[:3]))
    device = call.query.device
    terms = call.terms
    mask = call.mask
    dropout = call.dropout
    terms, scale = _fold_scale(terms, score_scale(terms, call.query.size(-1)))
    by_name = lay_out_tables(geometry, terms, mask)
    if dropout:
        batch, heads, (queries, keys) = geometry.batch, geometry.heads, geometry.padded
        by_name["query_seeds"] = draw_seeds(batch, heads, 2, queries, device=device)
        by_name["key_seeds"] = draw_seeds(batch, heads, keys, device=device)
    first = terms.first
    pair_bias = terms.pair_bias
    states = terms.states
    operands = operands._replace(
        **lay_out_segments(geometry, mask),
        **lay_out_window(geometry, mask),
        first=None if first is None else find_first_tokens(first, geometry.batch, geometry.heads),
        distance_bias=build_distance_mask(geometry, mask, device),
        pair_bias=None
        if pair_bias is None
        else reverse_queries(at_least_fp32(pair_bias), *geometry.missing),
        states=None
        if states is None
        else reverse_queries(at_least_fp32(states), geometry.missing[0]),
        masked=build_mask_bias(mask, geometry, device),
        fully_masked=find_fully_masked(mask, geometry),
        **by_name,
        **lay_out_softmax(geometry, call),
        **lay_out_decay(geometry, call),
    )
    starts = {name: runs.starts for name, runs in terms.runs.items()}
    folds = terms.product and _can_fold(terms)
    product = terms.product and not folds
    rule = Rule(product, folds, scale, dropout, saves=False, starts=starts, softcap=terms.softcap)
    return rule, operands


def _find_long_tables(terms: Terms, src_len: int) -> list[str]:
    """Find the tables that are better repeated to all distances.

    A table for each head is not among them: repeating it takes too long.
    """
    return [
        name
        for name, term, table in terms.present("table", "values", "states")
        if name in terms.runs
        and terms.runs[name].rows > ROWS_PER_KEY * src_len
        and not term.per_head(table)
    ]


def _can_fold(terms: Terms) -> bool:
    """Check whether a product is one of scaled queries and keys (see :mod:`.folded`)."""
    runs = [terms.runs.get(name) for name, *_ in terms.present("table")]
    same = bool(runs) and runs[0] is not None and all(other == runs[0] for other in runs)
    return same and terms.gain is None and terms.first is None


def _fold_scale(terms: Terms, scale: float) -> tuple[Terms, float]:
    """Fold the scale into a table if possible; also return the factor that remains for the queries.

    The terms of a sum are scaled one by one; a product is scaled once. A product without tables is
    a plain dot product.
    """
    if terms.key_table is not None:
        terms = terms._replace(key_table=at_least_fp32(terms.key_table) * scale)
        return terms, 1.0 if terms.product else scale
    if terms.product and terms.query_table is not None:
        return terms._replace(query_table=at_least_fp32(terms.query_table) * scale), 1.0
    return terms._replace(product=False), scale


def _count_saved_bytes(geometry: Geometry, rule: Rule, operands: Operands) -> int:
    """Count the bytes that a call would save if no window or segment hid any pair.

    Hidden pairs do not count, so that a window never makes a call save its blocks.
    """
    # Of a product the content and a term for each table; of a sum the weights, the content if it
    # has a gain, and capped scores.
    tables = [operands.query_table, operands.key_table]
    saved = tables if rule.product else [operands.gain, rule.softcap]
    numbers = 1 + sum(x is not None for x in saved)
    return numbers * geometry._replace(visible=()).pairs * operands.query.element_size()
