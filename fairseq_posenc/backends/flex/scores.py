"""Builds FlexAttention's ``score_mod``, a function that changes the score of a pair of tokens.

It serves all terms that the backend does not refuse but sinks. The products of tokens with table
rows are computed before; the function looks up the product of its pair.

B batch, H heads, T queries, S keys, D head size, G tables (1 for all heads, or H), R distances.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_posenc.backends.by_distance import row_index
from fairseq_posenc.backends.flex.blocks import index_or_zero, mark_batch_dynamic, round_length
from fairseq_posenc.backends.mask import Mask
from fairseq_posenc.encodings.precision import at_least_fp32
from fairseq_posenc.encodings.term import ByDistance, NumbersByPair, States
from fairseq_posenc.encodings.terms import Terms

# Changes a scaled score, given it and the indices of its sentence, head, query and key.
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
_NO_MASK = Mask()


def _find_visible_distances(tgt_len: int, src_len: int, mask: Mask) -> tuple[int, int]:
    """Find the lowest and the highest distance that a mask leaves visible."""
    limits = mask.locality
    reach = limits.reach(mask.direction) if limits.first_keys is None else None
    reach = src_len if reach is None else reach
    lowest = 0 if mask.direction == "rl" else max(-reach, 1 - src_len)
    highest = 0 if mask.direction == "lr" else min(reach, tgt_len - 1)
    return lowest, highest


def _pad_rows(x: Tensor, dim: int) -> Tensor:
    """Pad a dimension to a size of compiled kernels."""
    size = round_length(max(x.size(dim), 2))  # torch compiles a size of 1 apart
    return F.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, size - x.size(dim)))


class _ByRow(NamedTuple):
    """A number for each row of a table, or for each token and row, and the row of each pair.

    All fields are None where there is no table. Without an object, torch could not compile other
    terms: it asks for the tensors that it once found in it.
    """

    numbers: Tensor | None = None  # (B or 1, G, tokens or 1, rows)
    # By distance, (R,), or by pair, (B or 1, T, S); None: the distance itself.
    rows: Tensor | None = None

    def look_up(
        self, b: Tensor, h: Tensor, i: Tensor, j: Tensor, token: Tensor, distance: Tensor
    ) -> Tensor:
        """Look up the number of a pair.

        Args:
            b: index of the sentence.
            h: index of the head.
            i: index of the query.
            j: index of the key.
            token: ``i`` or ``j``, whichever was multiplied with the rows.
            distance: of the pair, counted from the lowest visible one.
        """
        assert self.numbers is not None
        row = distance
        if self.rows is not None:
            by_pair = self.rows.dim() == 3
            row = self.rows[index_or_zero(self.rows, 0, b), i, j] if by_pair else self.rows[row]
        return _look_up(self.numbers, b, h, index_or_zero(self.numbers, 2, token), row)


def _look_up(x: Tensor, b: Tensor, h: Tensor, *tokens: Tensor) -> Tensor:
    """Look up the number of a sentence, a head and tokens; sentence and head may be 1 for all."""
    return x[(index_or_zero(x, 0, b), index_or_zero(x, 1, h), *tokens)]


def _split_parts(decay: Tensor, keys: int) -> list[Tensor]:
    """Split ``(B or 1, H, S, parts)`` into parts, padded to ``keys``."""
    padded = F.pad(decay, (0, 0, 0, keys - decay.size(2)))
    # Copies: FlexAttention's compiler does not take several views of one tensor.
    return [part.contiguous() for part in padded.unbind(-1)]


def build_score_mod(
    terms: Terms,
    tgt_len: int,
    src_len: int,
    device: torch.device,
    mask: Mask = _NO_MASK,
    query: Tensor | None = None,
    key: Tensor | None = None,
    temperature: Tensor | None = None,
    decay: tuple[Tensor | None, Tensor | None] = (None, None),
) -> ScoreMod:
    """Make the function of a scaled score that FlexAttention takes.

    Args:
        terms: of the encodings, added to the scores.
        tgt_len: T.
        src_len: S.
        device: of the terms.
        mask: the keys that a query may see; rows of hidden distances are left out.
        query: ``(B, H, T, D)``, padded to the kernel's length; None if no term has a table.
        key: ``(B, H, S, D)``, padded in the same way.
        temperature: ``(B or 1, G, T)``, multiplies all scores of a query.
        decay: of earlier and later keys, ``(B or 1, H, S, parts)`` each; see
            :class:`AttentionCall`.
    """
    queries = tgt_len if query is None else query.size(2)  # with padding
    keys = src_len if key is None else key.size(2)
    missing = (0, keys - src_len, 0, queries - tgt_len)
    low, high = _find_visible_distances(tgt_len, src_len, mask)
    # What differs from call to call is a tensor: a number would be compiled into the kernel.
    past = torch.tensor(src_len - tgt_len, device=device)  # index of the first query
    shift = torch.tensor(low, device=device) + past
    last = torch.tensor(high - low, device=device)

    def tabulate(
        term: ByDistance | None, tokens: Tensor | None = None, factor: float = 1.0
    ) -> _ByRow:
        """Prepare the numbers of a table, or the products of tokens ``(B, H, n, D)`` with it."""
        if term is None:
            return _ByRow()
        table, index = at_least_fp32(term.table), None
        if term.ids is not None or terms.first is not None:
            index = F.pad(row_index(term, terms.first, tgt_len, src_len, mask), missing)
            mark_batch_dynamic(index)
        elif term.runs is not None:
            distances = torch.arange(low, high + 1, device=device)
            index = _pad_rows(term.runs.find(distances), 0)
        else:  # the tables of the terms begin at the distance 1 - S
            table = table.narrow(1, low + src_len - 1, high - low + 1)
        table = _pad_rows(table, 1)
        if tokens is None:
            return _ByRow(table[None, :, None], index)
        products = (at_least_fp32(tokens) * factor) @ table.transpose(-1, -2)
        mark_batch_dynamic(products)
        return _ByRow(products, index)

    product = terms.product
    # FlexAttention scales the scores, so summands must be scaled as well, and factors must not.
    scale = 1.0 if query is None or product else terms.scale(query.size(-1))
    by_query = tabulate(terms.rows("query"), query, scale)
    by_key = tabulate(terms.rows("key"), key, scale)
    by_state = _ByRow()
    if (of_queries := terms.find(States)) is not None:
        states = F.pad(of_queries.vectors, (0, 0, 0, queries - tgt_len))
        by_state = tabulate(terms.rows("state"), states)
    gain, bias = tabulate(terms.gain), tabulate(terms.bias)
    pair_bias = None
    if (by_pair := terms.find(NumbersByPair)) is not None:
        pair_bias = F.pad(at_least_fp32(by_pair.numbers), missing)
    softcap = terms.softcap
    if temperature is not None:
        temperature = F.pad(temperature, (0, queries - tgt_len))
    mark_batch_dynamic(pair_bias, temperature)
    earlier, later = (None if c is None else _split_parts(c, keys) for c in decay)
    mark_batch_dynamic(*(earlier or ()), *(later or ()))

    def compute_decay(parts: Sequence[Tensor], b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Any:
        """Compute c_i - c_j from the parts of c."""
        i = (i + past).clamp(max=keys - 1)  # a padded query may stand beyond all keys
        return sum(_look_up(c, b, h, i) - _look_up(c, b, h, j) for c in parts)

    def modify(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        distance = (j - i - shift).clamp(min=0).minimum(last)  # a hidden pair may have any row
        if gain.numbers is not None:
            score = score * gain.look_up(b, h, i, j, i, distance)
        if by_query.numbers is not None:
            term = by_query.look_up(b, h, i, j, i, distance)
            score = score * term if product else score + term
        if by_key.numbers is not None:
            term = by_key.look_up(b, h, i, j, j, distance)
            score = score * term if product else score + term
        if bias.numbers is not None:
            score = score + bias.look_up(b, h, i, j, i, distance)
        if pair_bias is not None:
            score = score + _look_up(pair_bias, b, h, i, j)
        if by_state.numbers is not None:
            score = score + by_state.look_up(b, h, i, j, i, distance)
        if earlier is not None and later is not None:
            is_later = j > i + past
            score = score + torch.where(
                is_later, compute_decay(later, b, h, i, j), compute_decay(earlier, b, h, i, j)
            )
        elif earlier is not None:
            score = score + compute_decay(earlier, b, h, i, j)
        if temperature is not None:
            score = score * _look_up(temperature, b, h, i)
        return score if softcap is None else softcap * torch.tanh(score / softcap)

    return modify
