"""Looks up what belongs to the distance of each pair by views, without an index.

Queries are stored last one first: then query i' and key j of a block have the distance i' + j,
counted from the block's lowest one, and its M queries and W keys need M + W - 1 table rows.

The product of tokens with these rows is *skewed*: the pairs of each token begin one column later
than those of the token before. A view whose row stride is longer by one undoes that without a copy,
forward and backward. For M = 2, W = 2, products ``ab. | .cd`` are the pairs ``ab | cd``: stride 4
in place of 3. Pictures are in ``docs/blocked.md``.

autograd would copy such views back one by one, so these functions have hand-written gradients.

Shapes: k sentences and h heads of a block, M queries, W keys, D head size; G tables (1 or h); n
tokens, queries or keys, in tiles of N.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

# Tokens that are multiplied with a common run of rows, and the smallest number of them where there
# are few tokens.
MAX_TILE, MIN_TILE = 64, 16
FEW_TOKENS = 128


def multiply_rows(x: Tensor, rows: Tensor, index: Tensor | None, of_keys: bool) -> Tensor:
    """Multiply tokens with the table rows of their pairs, q_i.Q_r or k_j.K_r, or distinct rows.

    Args:
        x: ``(k, h, n, D)``.
        rows: ``(G, M + W - 1, D)``, or distinct ones ``(G, U, D)``.
        index: which of the distinct rows each distance has, ``(M + W - 1,)``.
        of_keys: whether the tokens are keys.

    Returns:
        Numbers of pairs, ``(k, h, M, W)``, or with an index what :func:`look_up` takes.
    """
    if index is not None:
        return rows @ x.mT if of_keys else x @ (rows[0] if len(rows) == 1 else rows).mT
    # In a tile of N, each token is multiplied with N - 1 rows that it does not need: small tiles
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
    dim = 2 if of_keys else 3
    return products.gather(dim, _view_index(index, products.shape, dim))


def sum_rows(weights: Tensor, rows: Tensor, index: Tensor | None) -> Tensor:
    """Sum rows by the weights of pairs, sum over j of w_ij V_r: ``(k, h, M, D)``.

    Args:
        weights: ``(k, h, M, W)``.
        rows: see :func:`multiply_rows`.
        index: see :func:`multiply_rows`.
    """
    if index is None:
        index = torch.arange(rows.size(1), device=rows.device)
    by_row = weights.new_zeros(*weights.shape[:3], rows.size(1))
    return by_row.scatter_add(3, _view_index(index, weights.shape, 3), weights) @ rows


class Band(torch.autograd.Function):
    """Multiplies each token with the table rows of its pairs, all of which are distinct.

    Pairs of keys by queries are transposed to queries by keys, with all heads side by side as one
    matrix, which torch transposes several times faster than a view of several matrices.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, of_keys: bool) -> Tensor:
        """Multiply ``(k, h, n, D)`` and ``(G, M + W - 1, D)`` to ``(k, h, M, W)``."""
        ctx.save_for_backward(x, rows)
        ctx.of_keys = of_keys
        tiles = _unskew(_tile(x, rows) @ _window(rows, x.size(2)).mT, x.shape)
        if not of_keys:
            return tiles.flatten(2, 3)
        pairs = x.new_empty(*x.shape[:2], tiles.size(4), x.size(2))
        by_token = tiles.permute(2, 3, 0, 1, 4).reshape(x.size(2), -1)  # [n, k * h * others]
        pairs.view(-1, x.size(2)).copy_(by_token.t())
        return pairs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of tokens and rows."""
        x, rows = ctx.saved_tensors
        tiles, window = _tile(x, rows), _window(rows, x.size(2))
        skewed = grad.new_empty(*tiles.shape[:3], window.size(2))
        pairs = _unskew(skewed, x.shape)  # [k, h, tiles, N, others]
        size = pairs.size(3)
        # Zeros are where a tile's rows are not those of a token: up to N - 1 on either side.
        skewed[..., : size - 1], skewed[..., pairs.size(4) :] = 0, 0
        if ctx.of_keys:
            by_token = grad.reshape(-1, x.size(2)).t().contiguous()  # [n, k * h * others]
            grad = by_token.view(*pairs.shape[2:4], *pairs.shape[:2], -1).permute(2, 3, 0, 1, 4)
        pairs.copy_(grad.reshape(pairs.shape))
        x_grad = (skewed @ window).unflatten(2, (-1, size))  # [G, tiles, k * h / G, N, D]
        rows_grad = torch.zeros_like(rows)
        by_tile = skewed.mT @ tiles  # [G, tiles, N + others - 1, D]
        for index in range(by_tile.size(1)):  # one by one, since neighbouring tiles share rows
            rows_grad[:, index * size : index * size + by_tile.size(2)] += by_tile[:, index]
        return x_grad.transpose(1, 2).reshape(x.shape), rows_grad, None


class AddLookedUp(torch.autograd.Function):
    """Adds the products of tokens with distinct rows to numbers of pairs, in place.

    Far pairs, those with the first keys and with the last ones, have the first and the last row.
    """

    @staticmethod
    def forward(
        ctx: Any,
        pairs: Tensor,
        products: Tensor,
        index: Tensor,
        of_keys: bool,
        widths: tuple[int, int, int],
    ) -> Tensor:
        """Add to ``(k, h, M, W)``, and return it.

        Args:
            ctx: torch's context of this call.
            pairs: the numbers of pairs.
            products: ``(k, h, M, U)`` of queries, or ``(k, h, U, W)`` of keys.
            index: the row of each distance of near pairs.
            of_keys: whether the tokens are keys.
            widths: the numbers of keys that are far before near ones, near, and far after them.
        """
        ctx.save_for_backward(index)
        ctx.shape, ctx.widths, ctx.dim = products.shape, widths, 2 if of_keys else 3
        ctx.mark_dirty(pairs)
        for part, of_part, is_near in _split(pairs, products, ctx):
            if is_near:
                of_part = of_part.gather(ctx.dim, _view_index(index, of_part.shape, ctx.dim))
            part += of_part
        return pairs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Sum the gradients of equal rows."""
        (index,) = ctx.saved_tensors
        sums = grad.new_zeros(ctx.shape)
        for part, of_part, is_near in _split(grad, sums, ctx):
            if is_near:
                of_part.scatter_add_(ctx.dim, _view_index(index, of_part.shape, ctx.dim), part)
            else:
                of_part += part.sum(ctx.dim, keepdim=True)
        return grad, sums, None, None, None


def _split(pairs: Tensor, products: Tensor, ctx: Any) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """Yield the pairs before near ones, near ones, and those after them, with their products."""
    parts = products.split(ctx.widths, 3) if ctx.dim == 2 else [products] * 3
    for place, part, of_part in zip(("before", "near", "after"), pairs.split(ctx.widths, 3), parts):
        rows = {"before": slice(1), "near": slice(None), "after": slice(-1, None)}[place]
        yield part, of_part[:, :, rows] if ctx.dim == 2 else of_part[..., rows], place == "near"


def _view_index(index: Tensor, shape: torch.Size, dim: int) -> Tensor:
    """View an index by distance, ``(M + W - 1,)``, as that of pairs, ``(k, h, M, W)``.

    Args:
        index: of the distances of a block.
        shape: that of pairs, but in one dimension.
        dim: this dimension.
    """
    size = list(shape)
    size[dim] = len(index) - shape[5 - dim] + 1  # 5 - dim: the other one of dimensions 2 and 3
    return index.as_strided(size, (0, 0, 1, 1), index.storage_offset())


def _tile(x: Tensor, rows: Tensor) -> Tensor:
    """Reshape ``(k, h, n, D)`` to ``(G, tiles, k * h / G * N, D)``: a product for all heads."""
    x = x.flatten(0, 1).unflatten(1, (-1, math.gcd(x.size(2), MAX_TILE)))  # [k * h, tiles, N, D]
    return x.unflatten(0, (rows.size(0), -1)).transpose(1, 2).flatten(2, 3)


def _window(rows: Tensor, tokens: int) -> Tensor:
    """View the rows of each tile of tokens, ``(G, tiles, N + others - 1, D)``; they overlap."""
    groups, count, width = rows.shape
    tile = math.gcd(tokens, MAX_TILE)  # so that tiles divide the tokens
    size = (groups, tokens // tile, tile + count - tokens, width)
    strides = (rows.stride(0), tile * rows.stride(1), rows.stride(1), rows.stride(2))
    return rows.as_strided(size, strides, rows.storage_offset())


def _unskew(skewed: Tensor, shape: torch.Size) -> Tensor:
    """View pairs ``(k, h, tiles, N, others)`` in ``(G, tiles, k * h / G * N, N + others - 1)``.

    With a table for each head, a block has one sentence (``split``). ``shape`` is ``(k, h, n, D)``.
    """
    groups, tiles, stacked, rows = skewed.shape
    size = shape[2] // tiles
    to_next_head = size * rows if groups == 1 else tiles * stacked * rows
    strides = (to_next_head * shape[1], to_next_head, stacked * rows, rows + 1, 1)
    return skewed.as_strided((*shape[:2], tiles, size, rows - size + 1), strides)
