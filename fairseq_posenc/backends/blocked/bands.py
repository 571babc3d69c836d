"""Multiplies tokens by the table row of each pair's distance: by views, or by an index of rows.

Queries are stored in reverse: then query i' and key j of a block have the distance i' + j, counted
from the block's lowest one, and its M queries and W keys need M + W - 1 table rows.

The product of tokens with these rows is *skewed*: the pairs of each token begin one column later
than those of the token before. A view whose row stride is longer by one undoes that without a copy,
forward and backward. For M = 2, W = 2, products ``ab. | .cd`` are the pairs ``ab | cd``: stride 4
in place of 3 (pictures: ``docs/blocked.md``). autograd would copy the gradient of each such view,
so :class:`Band` has a hand-written one.

Shapes: k sentences and h heads of a block, M queries, W keys, D head size; G tables (1 or h); n
tokens, queries or keys, in tiles of N, and ``others``, the number of those on the other side.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

# n is padded to a multiple of MAX_TILE (MIN_TILE below FEW_TOKENS), and N is gcd(n, MAX_TILE).
MAX_TILE, MIN_TILE, FEW_TOKENS = 64, 16, 128


def multiply_rows(x: Tensor, rows: Tensor, index: Tensor | None, of_keys: bool) -> Tensor:
    """Multiply tokens by the table rows of their pairs, q_i.Q_r or k_j.K_r, or by distinct rows.

    Args:
        x: ``(k, h, n, D)``.
        rows: ``(G, M + W - 1, D)``, or distinct ones ``(G, U, D)``.
        index: which of the distinct rows each distance has, ``(M + W - 1,)``.
        of_keys: whether the tokens are keys.

    Returns:
        Numbers of pairs, ``(k, h, M, W)``, or with an index what :func:`look_up` takes.
    """
    if index is not None:  # with `rows[0]`, all heads make one product: faster for queries
        return rows @ x.mT if of_keys else x @ (rows[0] if len(rows) == 1 else rows).mT
    # In a tile of N, each token is multiplied by N - 1 rows that it does not need: small tiles
    # waste little; but tiles that are too small make slow matrix products.
    tokens = x.size(2)
    missing = -tokens % (MAX_TILE if tokens >= FEW_TOKENS else MIN_TILE)
    if missing:
        x, rows = (F.pad(y, (0, 0, 0, missing)) for y in (x, rows))
    pairs: Tensor = Band.apply(x, rows, of_keys)
    return pairs.narrow(3 if of_keys else 2, 0, tokens) if missing else pairs


def look_up(products: Tensor, index: Tensor | None, of_keys: bool) -> Tensor:
    """Look up the numbers of pairs in the results of :func:`multiply_rows`, ``(k, h, M, W)``."""
    if index is None:
        return products
    # Products: (k, h, U, W) of keys, (k, h, M, U) of queries. The next token has the next distance.
    width = products.size(3) if of_keys else len(index) - products.size(2) + 1
    by_pair = index.unfold(0, width, 1).expand(*products.shape[:2], -1, -1)
    with saved_tensors_hooks(  # the gradient needs only the shape of the products
        lambda x: x.new_empty(()).expand(x.shape) if x.is_floating_point() else x, lambda x: x
    ):
        return products.gather(2 if of_keys else 3, by_pair)


def sum_rows(weights: Tensor, rows: Tensor) -> Tensor:
    """Sum rows by the weights of pairs, sum over j of w_ij V_r: ``(k, h, M, D)``.

    The weights are ``(k, h, M, W)``, the rows ``(G, M + W - 1, D)``.
    """
    queries, distances = weights.size(2), rows.size(1)
    # By distance: the weights of each query begin one column later than those of the one before.
    flat = F.pad(weights, (0, queries)).flatten(2)[..., : queries * distances]
    return flat.unflatten(2, (queries, distances)) @ rows


class Band(torch.autograd.Function):
    """Multiplies each token by the table rows of its pairs, all of which are distinct."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, of_keys: bool) -> Tensor:
        """Multiply ``(k, h, n, D)`` and ``(G, M + W - 1, D)``, n = M or W, to ``(k, h, M, W)``."""
        ctx.save_for_backward(x, rows)
        ctx.of_keys = of_keys
        tiles, window = _tile(x, rows), _window(rows, x.size(2))
        pairs = _unskew(tiles @ window.mT, x.shape)  # [k, h, tiles, N, others]
        return pairs.permute(0, 1, 4, 2, 3).flatten(3) if of_keys else pairs.flatten(2, 3)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of tokens and rows."""
        x, rows = ctx.saved_tensors
        tiles, window = _tile(x, rows), _window(rows, x.size(2))
        stacked, count = tiles.size(2), window.size(2)  # tokens of all heads in a tile; its rows
        shape = (count, stacked) if ctx.of_keys else (stacked, count)  # keys last, as in `grad`
        skewed = grad.new_empty(*tiles.shape[:2], *shape)
        skewed = skewed.mT if ctx.of_keys else skewed  # [G, tiles, k * h / G * N, N + others - 1]
        pairs = _unskew(skewed, x.shape)
        tile = pairs.size(3)  # N
        # Zeros stay where a tile's rows are not those of a token: up to N - 1 on either side.
        skewed[..., : tile - 1] = 0
        skewed[..., pairs.size(4) :] = 0
        by_tile = grad.unflatten(3 if ctx.of_keys else 2, (-1, tile))
        by_tile = by_tile.permute(0, 1, 3, 4, 2) if ctx.of_keys else by_tile  # shaped as `pairs`
        few = (-1, math.gcd(pairs.size(4), 16))  # transposing is faster in parts that fit a cache
        pairs.unflatten(4, few).copy_(by_tile.unflatten(4, few))
        x_grad = (skewed @ window).unflatten(2, (-1, tile))  # [G, tiles, k * h / G, N, D]
        rows_grad = torch.zeros_like(rows)
        of_window = skewed.mT @ tiles  # [G, tiles, N + others - 1, D]
        for index in range(of_window.size(1)):  # one by one, since neighboring tiles share rows
            rows_grad[:, index * tile : index * tile + count] += of_window[:, index]
        return x_grad.transpose(1, 2).reshape(x.shape), rows_grad, None


def _tile(x: Tensor, rows: Tensor) -> Tensor:
    """Reshape ``(k, h, n, D)`` to ``(G, tiles, k * h / G * N, D)``; with h tables, k is 1."""
    x = x.flatten(0, 1).unflatten(1, (-1, math.gcd(x.size(2), MAX_TILE)))  # [k * h, tiles, N, D]
    return x.unflatten(0, (rows.size(0), -1)).transpose(1, 2).flatten(2, 3)


def _window(rows: Tensor, tokens: int) -> Tensor:
    """View the rows of each tile of tokens, ``(G, tiles, N + others - 1, D)``; they overlap."""
    groups, count, width = rows.shape
    tile = math.gcd(tokens, MAX_TILE)  # N: 16, 32 or 64, which divides the (padded) tokens
    size = (groups, tokens // tile, tile + count - tokens, width)  # count: tokens + others - 1
    strides = (rows.stride(0), tile * rows.stride(1), rows.stride(1), rows.stride(2))
    return rows.as_strided(size, strides)


def _unskew(skewed: Tensor, shape: torch.Size) -> Tensor:
    """View pairs ``(k, h, tiles, N, others)`` in ``(G, tiles, k * h / G * N, N + others - 1)``.

    With a table for each head, k is 1 (``geometry.split``). ``shape`` is ``(k, h, n, D)``.
    """
    groups, tiles, _, rows = skewed.shape
    to_next_group, to_next_tile, to_next_token, to_next_row = skewed.stride()
    size = shape[2] // tiles
    to_next_head = size * to_next_token if groups == 1 else to_next_group
    of_heads = (to_next_head * shape[1], to_next_head)
    strides = (*of_heads, to_next_tile, to_next_token + to_next_row, to_next_row)
    return skewed.as_strided((*shape[:2], tiles, size, rows - size + 1), strides)
