"""Looks up table rows by distance for the pairs of queries and keys, through views and indices.

A table has a row for each distance r = j - i, from 1 - S to T - 1, or for each run of distances. If
the first token is *reset*, two rows follow, for its pairs as a query and for its pairs as a key.

B batch, H heads, T queries, S keys, R = T + S - 1 distances, G tables: one for all heads, or H.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_posenc.encodings.runs import Runs
from fairseq_posenc.encodings.term import ByDistance, NumbersByDistance, NumbersByPair
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.mask import NO_MASK, Mask
from fairseq_posenc.precision import at_least_fp32


def expand_by_distance(
    table: Tensor, tgt_len: int, src_len: int, first: Tensor | None = None
) -> Tensor:
    """Look up the number of each query and key in a table by distance, ``(1 or B, G, T, S)``.

    >>> numbers = torch.tensor([[10, 11, 12, 13]])  # of the distances -2, -1, 0 and 1
    >>> expand_by_distance(numbers, tgt_len=2, src_len=3)[0, 0]
    tensor([[11, 12, 13],
            [10, 11, 12]])

    Args:
        table: a number for each distance from 1 - S to T - 1, ``(G, R)``; with ``first``, two more.
        tgt_len: T.
        src_len: S.
        first: ``(B or 1, S)`` of bool, True for a token whose pairs have the last two numbers
            instead (:class:`~fairseq_posenc.encodings.term.Reset`); None for no such token.
    """
    if first is not None:
        pairs = expand_by_distance(table[:, :-2], tgt_len, src_len)
        of_query, of_key = table[:, -2:, None, None].unbind(1)  # each [G, 1, 1]
        return insert_reset(pairs, of_query, of_key, first)
    if torch.compiler.is_compiling():  # it would compile `unfold` again for each length
        wider = F.pad(table, (0, 1))[None, :, None]  # [1, G, 1, R + 1]
        return relative_shift(wider.expand(-1, -1, tgt_len, -1), src_len)
    # The last query reads the table's first S rows; each query before it begins one row later.
    return table.unfold(1, src_len, 1).flip(1)[None]


def expand_numbers(
    term: NumbersByDistance, first: Tensor | None, tgt_len: int, src_len: int, mask: Mask
) -> Tensor:
    """Look up a gain or bias for each query and key by distance or ids, ``(1 or B, G, T, S)``.

    Args:
        term: the numbers.
        first: see :func:`expand_by_distance`.
        tgt_len: T.
        src_len: S.
        mask: has the forward pass's cache, which keeps the indices for all layers.
    """
    if term.ids is not None:  # `runs.ids`: distances are differences of these, not of indices
        index = row_index(term, first, tgt_len, src_len, mask)
        return at_least_fp32(term.table)[:, index].transpose(0, 1)  # [1 or B, G, T, S]
    numbers = at_least_fp32(term.expand())  # one for each distance, also where runs share one
    return expand_by_distance(numbers, tgt_len, src_len, first)


def sum_biases(terms: Terms, tgt_len: int, src_len: int, mask: Mask = NO_MASK) -> Tensor | None:
    """Add up the biases by distance and by pair, ``(1 or B, G, T, S)``, once for all layers."""
    bias, by_pair = terms.bias, terms.find(NumbersByPair)
    numbers = None if by_pair is None else at_least_fp32(by_pair.numbers)
    if bias is None:
        return numbers

    def add_up() -> Tensor:
        by_distance = expand_numbers(bias, terms.first, tgt_len, src_len, mask)
        return by_distance if numbers is None else by_distance + numbers

    deps = (bias.table, by_pair and by_pair.numbers, terms.first, tgt_len, src_len)
    return mask.cached("bias", deps, add_up)


def relative_shift(products: Tensor, others: int) -> Tensor:
    """Shift products of n tokens with table rows to pairs, ``(B, H, n, others)``, without an index.

    Transformer-XL's relative shift. The pairs of token i begin at row n-1-i, so each token begins
    one row before the previous token. In a flat list whose rows are shorter by one, they all begin
    in one column: for n = 2, rows ``abc.|def.`` become ``bc.|def`` (from n-1 on, R wide).

    Args:
        products: ``(B, H, n, R + 1)``, with a meaningless last column.
        others: number of keys, or of queries where the tokens are keys.
    """
    tokens, rows = products.shape[2:]
    shifted = products.flatten(2)[..., tokens - 1 : tokens * rows - 1]  # [B, H, n * R]
    return shifted.unflatten(2, (tokens, rows - 1))[..., :others]  # [B, H, n, others]


def insert_reset(
    pairs: Tensor, of_query: Tensor | int, of_key: Tensor | int, first: Tensor
) -> Tensor:
    """Replace the values of the first token's pairs by the reset's two.

    Args:
        pairs: ``(1 or B, G, T, S)``.
        of_query: the value where the first token is the query; broadcast to the pairs.
        of_key: the value where it is the key of another query.
        first: see :func:`expand_by_distance`.
    """
    queries = first[:, None, -pairs.size(2) :, None]  # [B or 1, 1, T, 1]
    keys = first[:, None, None]  # [B or 1, 1, 1, S]
    return torch.where(queries, of_query, torch.where(keys, of_key, pairs))


def row_index(
    term: ByDistance, first: Tensor | None, tgt_len: int, src_len: int, mask: Mask
) -> Tensor:
    """Index a table's row of each pair, ``(1 or B, T, S)`` of int64, once for all layers.

    The arguments are those of :func:`expand_numbers`.
    """
    runs, device = term.runs, term.table.device
    # The cache holds one value of each name. All tables without runs have the same index.
    name = "rows" if runs is None else f"rows of {term.name}"
    deps = (runs, first, tgt_len, src_len, device)
    return mask.cached(name, deps, lambda: _compute_row_index(*deps))


def _compute_row_index(
    runs: Runs | None, first: Tensor | None, tgt_len: int, src_len: int, device: torch.device
) -> Tensor:
    """Compute what :func:`row_index` caches."""
    if runs is not None and runs.ids is not None:
        return runs.find_pairs(first)  # `runs` has T and the ids of the S keys
    distances = torch.arange(1 - src_len, tgt_len, device=device)
    index = distances + (src_len - 1) if runs is None else runs.find(distances)
    rows = distances.size(0) if runs is None else runs.num_rows
    pairs = expand_by_distance(index[None], tgt_len, src_len)
    if first is not None:
        pairs = insert_reset(pairs, rows, rows + 1, first)  # the indices of the reset's two rows
    return pairs[:, 0]  # [1 or B, T, S]
