"""Builds FlexAttention's ``score_mod``, a function that changes the score of a pair of tokens.

The products of tokens with table rows are computed first. The function looks up the product of its
pair, and all other numbers of the pair.

B batch, H heads, T queries, S keys, D head size, G tables (1 or H), R distances, W width of states.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_posenc.backends.by_distance import row_index
from fairseq_posenc.encodings.term import ByDistance, NumbersByPair, RowsByDistance, States
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.mask import NO_MASK, Mask
from fairseq_posenc.precision import at_least_fp32

# Changes a scaled score, given it and the indices of its sentence, head, query and key.
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
TILE = 128  # queries, and keys, of a tile of the block mask


class _Numbers(NamedTuple):
    """Numbers of pairs, by token and table row; any dimension may be 1 for all."""

    numbers: Tensor  # (B, H, tokens, rows)
    # The row of each distance, (R,), or pair, (B or 1, T, S); None: the row of a pair is its key.
    rows: Tensor | None = None
    of_keys: bool = False  # whether the tokens are keys, not queries

    def look_up(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor, distance: Tensor) -> Tensor:
        """Look up the number of a sentence, head, query and key.

        ``distance`` is counted from the lowest visible one.
        """
        if self.rows is None:
            row = j
        elif self.rows.dim() == 3:
            row = self.rows[index_or_zero(self.rows, 0, b), i, j]
        else:
            row = self.rows[distance]
        x, token = self.numbers, j if self.of_keys else i
        b, h = index_or_zero(x, 0, b), index_or_zero(x, 1, h)
        token, row = index_or_zero(x, 2, token), index_or_zero(x, 3, row)
        return x[b, h, token, row]


def build_score_mod(
    terms: Terms,
    tgt_len: int,
    src_len: int,
    device: torch.device,
    mask: Mask = NO_MASK,
    query: Tensor | None = None,
    key: Tensor | None = None,
    temperature: Tensor | None = None,
) -> ScoreMod:
    """Make the function of a scaled score that FlexAttention takes.

    Args:
        terms: of the encodings, added to the scores.
        tgt_len: T.
        src_len: S.
        device: of the terms.
        mask: leaves out rows of hidden distances; its cache keeps indices for all layers.
        query: ``(B, H, T, D)``, padded if the kernel has more than T queries: numbers of pairs are
            padded to as many. None if it has T, and no term has rows.
        key: ``(B, H, S, D)``, padded in the same way; None if the query is None.
        temperature: ``(B or 1, G, T)``, multiplies all scores of a query.
    """
    more_queries = 0 if query is None else query.size(2) - tgt_len  # so many are padding
    missing = (0, 0 if key is None else key.size(2) - src_len, 0, more_queries)  # for F.pad
    low, high = _find_visible_distances(tgt_len, src_len, mask)
    # Both are tensors, as they differ from call to call: numbers would be compiled into the kernel.
    lowest = torch.tensor(src_len - tgt_len + low, device=device)  # of j - i; i counts queries only
    span = torch.tensor(high - low, device=device)

    def tabulate(
        term: ByDistance | None, tokens: Tensor | None = None, factor: float = 1.0
    ) -> list[_Numbers]:
        """List the numbers of a table, or the products of tokens ``(B, H, n, D)`` with it."""
        if term is None:
            return []
        table, distances = at_least_fp32(term.table), torch.arange(low, high + 1, device=device)
        # With position ids, or with a reset, the row of a pair does not follow from its distance.
        # A reset gives two more rows to pairs of each sentence's first token, which `first` marks.
        if term.ids is not None or terms.first is not None:
            rows = F.pad(row_index(term, terms.first, tgt_len, src_len, mask), missing)
            mark_batch_dynamic(rows)
        elif term.runs is not None:  # several distances may share a row
            rows = _pad_rows(term.runs.find(distances), 0)
        else:  # a row for each distance from 1 - S on, of which the visible ones are kept
            table = table.narrow(1, low + src_len - 1, high - low + 1)
            rows = _pad_rows(distances - low, 0)
        table = _pad_rows(table, 1)
        if tokens is None:
            return [_Numbers(table[None, :, None], rows)]
        products = (at_least_fp32(tokens) * factor) @ table.transpose(-1, -2)
        return [_Numbers(products, rows, isinstance(term, RowsByDistance) and term.of == "key")]

    # FlexAttention scales q.k, so products that are added to it must be scaled, but not factors.
    scale = 1.0 if query is None or terms.product else terms.scale(query.size(-1))
    products = tabulate(terms.rows("query"), query, scale) + tabulate(terms.rows("key"), key, scale)
    factors, summands = tabulate(terms.gain), tabulate(terms.bias)
    (factors if terms.product else summands).extend(products)
    if (by_pair := terms.find(NumbersByPair)) is not None:  # (B or 1, G, T, S)
        summands.append(_Numbers(F.pad(at_least_fp32(by_pair.numbers), missing)))
    if (states := terms.find(States)) is not None:  # of queries; their products are not scaled
        vectors = F.pad(states.vectors, (0, 0, 0, more_queries))  # (B, H, T, W), padded
        summands += tabulate(terms.rows("state"), vectors)
    softcap, temperatures = terms.softcap, []
    if temperature is not None:
        temperatures = [_Numbers(F.pad(temperature, (0, more_queries))[..., None])]
    mark_batch_dynamic(*(x.numbers for x in [*factors, *summands, *temperatures]))

    def modify(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        distance = (j - i - lowest).clamp(min=0).minimum(span)  # a hidden pair may have any row
        for factor in factors:
            score = score * factor.look_up(b, h, i, j, distance)
        for summand in summands:
            score = score + summand.look_up(b, h, i, j, distance)
        for factor in temperatures:
            score = score * factor.look_up(b, h, i, j, distance)
        return score if softcap is None else softcap * torch.tanh(score / softcap)

    return modify


def _find_visible_distances(tgt_len: int, src_len: int, mask: Mask) -> tuple[int, int]:
    """Find the lowest and the highest distance that a mask leaves visible."""
    reach = mask.reach  # to the farthest visible key; None for no limit
    if reach is None or mask.first_keys is not None:  # first keys are seen from any distance
        reach = src_len
    lowest = 0 if mask.direction == "rl" else max(-reach, 1 - src_len)
    highest = 0 if mask.direction == "lr" else min(reach, tgt_len - 1)
    return lowest, highest


def _pad_rows(x: Tensor, dim: int) -> Tensor:
    """Pad a dimension to a size that kernels are compiled for."""
    size = round_length(max(x.size(dim), 2))  # torch compiles a size of 1 separately
    return F.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, size - x.size(dim)))  # last dimension first


def round_length(length: int) -> int:
    """Round a length up to one that kernels are compiled for.

    These are 1, for a step of decoding, multiples of 128 up to 1,024, and above that multiples of
    an eighth of the next power of two: four lengths in each doubling.
    """
    if length == 1:
        return 1
    step = max(TILE, 2 ** (length - 1).bit_length() // 8)
    return -(-length // step) * step


def mark_batch_dynamic(*tensors: Tensor | None) -> None:
    """Let one compiled kernel serve every size of the first dimension, unless that is 1."""
    for x in tensors:
        if x is not None and x.size(0) > 1 and not torch.compiler.is_compiling():
            torch._dynamo.maybe_mark_dynamic(x, 0)


def index_or_zero(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """Return the index, or zeros where the dimension has one entry for all."""
    return index if x.size(dim) > 1 else torch.zeros_like(index)
