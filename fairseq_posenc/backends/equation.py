"""The equation of attention as it is written, for any queries and keys.

With q_i and k_j the (rotated) query and key and r = j - i their distance, the score is::

    e_ij = tau_i * (scale * combine(gain_r * q_i.k_j,  q_i.Q_r,  k_j.K_r)
                    +  q_i.a_p  +  bias_r  +  bias_ij)

where combine is a sum or a product, and p a position that depends on the content. A softcap C then
turns e into C * tanh(e / C). The functions take tensors of pairs, which a backend has looked up by
distance, id or token: all pairs of a call at once (the reference), or a block of them.

Shapes: B batch, H heads, M queries, W keys, D head size. Pairs have the shape ``(B, H, M, W)``, or
one that broadcasts to it.
"""

import operator
from collections.abc import Callable, Iterable
from functools import reduce

import torch
from torch import Tensor


def score(
    content: Tensor,
    rows: Iterable[Tensor] = (),
    *,
    product: bool = False,
    gain: Tensor | None = None,
    scale: float = 1.0,
    count_positions: Callable[[Tensor], Tensor] | None = None,
    biases: Iterable[Tensor] = (),
    temperature: Tensor | None = None,
    softcap: float | None = None,
    add: Callable[[Tensor, Tensor], Tensor] = operator.add,
) -> Tensor:
    """Compute the scores of pairs before masks and softmax, ``(B, H, M, W)``.

    Args:
        content: q_i.k_j, which ``add`` may overwrite.
        rows: q_i.Q_r and k_j.K_r, or one of them.
        product: whether content and rows are multiplied, not added.
        gain: a factor of the content.
        scale: a factor of content and rows together.
        count_positions: computes q_i.a_p from the scaled content (:func:`score_counted`).
        biases: all that is added after scaling: bias_r, bias_ij, and other numbers of pairs.
        temperature: tau_i, a factor of all scores of a query, ``(B, H, M, 1)``.
        softcap: C, which turns e into C * tanh(e / C).
        add: adds its second argument to the first, perhaps in place: a block then needs no copy.
    """
    if gain is not None:
        content = content * gain
    if count_positions is not None:
        biases = [count_positions(content * scale), *biases]  # before `add` overwrites the content
    combined = reduce(operator.mul if product else add, rows, content)
    scores = reduce(add, biases, combined * scale if scale != 1.0 else combined)
    if temperature is not None:
        scores = scores * temperature
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def score_counted(query: Tensor, table: Tensor, content: Tensor, hidden: Tensor | None) -> Tensor:
    """Multiply queries by the rows at counted positions (CoPE), q_i.a_p of all pairs.

    The position p of key j is the sum of sigmoid(content) over the keys from j to the query; a_p
    is interpolated between the rows of the whole numbers around p.

    Args:
        query: ``(B, H, M, D)``.
        table: a, ``(P, D)``.
        content: scaled q_i.k_j of all keys that the queries may see.
        hidden: True for keys that a query must not see, which are not counted.
    """
    gates = content.sigmoid()
    gates = gates if hidden is None else gates.masked_fill(hidden, 0.0)
    positions = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=len(table) - 1)  # sum from j on
    by_row = query @ table.T  # [B, H, M, P]
    whole = positions.detach().floor()
    fraction = positions - whole  # a NaN stays one, though an index cannot be NaN
    below = whole.nan_to_num().long()
    above = (below + 1).clamp(max=len(table) - 1)  # at the last row, the fraction is 0
    return by_row.gather(-1, below) * (1 - fraction) + by_row.gather(-1, above) * fraction


def subtract_sums(query_sums: Tensor, key_sums: Tensor) -> Tensor:
    """Subtract a sum of each key from one of each query, c_i - c_j (forgetting attention).

    Sums are given in parts that add up to c, ``(B, H, M, parts)`` and ``(B, H, W, parts)``.
    """
    # Part by part: added up, large sums would lose their small differences.
    parts = zip(query_sums.unbind(-1), key_sums.unbind(-1))
    return reduce(operator.add, (c_i[..., None] - c_j[..., None, :] for c_i, c_j in parts))


def softmax(
    scores: Tensor, hidden: Tensor | None, sink: Tensor | None = None, may_hide_all: bool = True
) -> Tensor:
    """Mask and normalize scores; a query that may see no key gets zeros.

    Masks come last: they are applied to the whole score, and are never a factor of it.

    Args:
        scores: of queries and keys, ``(B, H, M, W)``.
        hidden: True for keys that a query must not see.
        sink: for each head, a score whose weight is dropped, ``(H,)``.
        may_hide_all: whether queries may see no key. If not, the finite fill alone gives zeros.
    """
    keys = scores.size(3)
    if hidden is not None:
        # A finite fill, then exact zeros: a row of -inf would give NaN, also in the gradient.
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
    if sink is not None:
        column = sink.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)  # [B, H, M, W + 1]
    weights = scores.softmax(-1)[..., :keys]
    return weights if hidden is None or not may_hide_all else weights.masked_fill(hidden, 0.0)
