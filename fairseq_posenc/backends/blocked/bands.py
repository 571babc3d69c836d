"""Looks up what belongs to the distance of each pair by views, without an index.

Queries are stored last one first: then query i' and key j of a block have the distance i' + j,
counted from the block's lowest one, and its M queries and W keys need M + W - 1 table rows.

The product of tokens with these rows is *skewed*: the pairs of each token begin one column later
than those of the token before. A view whose row stride is longer by one undoes that without a copy,
forward and backward. For M = 2, W = 2, products ``ab. | .cd`` are the pairs ``ab | cd``: stride 4
in place of 3. Pictures are in ``docs/blocked.md``.

autograd would copy such views back one by one, so these functions have hand-written gradients.

Shapes: k sentences and h heads of a block, M queries, W keys, D head size; G tables (1 or h).
"""

import math
from typing import Any

import torch
from torch import Tensor

from fairseq_posenc.backends.base import refuse_second_order

# Tokens that are multiplied with a common run of rows. Each token needs only as many rows as there
# are tokens on the other side, so small tiles compute few needless products.
MAX_TILE = 64


class Band(torch.autograd.Function):
    """Multiplies each token with the table rows of its pairs: q_i.Q_r or k_j.K_r."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, of_keys: bool) -> Tensor:
        """Multiply tokens ``(k, h, n, D)`` with rows ``(G, M + W - 1, D)``.

        Returns:
            ``(k, h, M, W)`` for keys; for queries a view of tiles, ``(k, h, tiles, N, W)``.
        """
        ctx.save_for_backward(x, rows)
        ctx.of_keys = of_keys
        pairs = _unskew(_tile(x, rows) @ _window(rows, x.size(2)).mT, x)
        return _transpose(pairs.flatten(2, 3)) if of_keys else pairs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of tokens and rows."""
        refuse_second_order("blocked")
        x, rows = ctx.saved_tensors
        skewed = _skew(_transpose(grad) if ctx.of_keys else grad.flatten(2, 3), x, rows)
        x_grad = rows_grad = None
        if ctx.needs_input_grad[0]:
            x_grad = _restore(skewed @ _window(rows, x.size(2)), x)
        if ctx.needs_input_grad[1]:
            rows_grad = _sum_tiles(skewed, x, rows)
        return x_grad, rows_grad, None


class BandSum(torch.autograd.Function):
    """Sums table rows by the weights of pairs: the sum over j of w_ij V_r."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, rows: Tensor) -> Tensor:
        """Sum rows ``(G, M + W - 1, D)`` by weights ``(k, h, M, W)``: ``(k, h, M, D)``."""
        ctx.save_for_backward(weights, rows)
        like = weights.new_empty(*weights.shape[:3], rows.size(2))
        return _restore(_skew(weights, like, rows) @ _window(rows, weights.size(2)), like)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of weights and rows."""
        refuse_second_order("blocked")
        weights, rows = ctx.saved_tensors
        by_pair = _unskew(_tile(grad, rows) @ _window(rows, grad.size(2)).mT, grad)
        rows_grad = None
        if ctx.needs_input_grad[1]:
            rows_grad = _sum_tiles(_skew(weights, grad, rows), grad, rows)
        return by_pair.flatten(2, 3), rows_grad


class Spread(torch.autograd.Function):
    """Looks up the products of tokens with distinct rows for pairs; autograd would save them."""

    @staticmethod
    def forward(ctx: Any, products: Tensor, index: Tensor, of_keys: bool) -> Tensor:
        """Look up the products of pairs, ``(k, h, M, W)``.

        Args:
            ctx: of torch.
            products: ``(k, h, M, U)`` of queries, or ``(k, h, U, W)`` of keys.
            index: the row of each distance, ``(M + W - 1,)``.
            of_keys: whether the tokens are keys.
        """
        ctx.save_for_backward(index)
        ctx.shape, ctx.dim = products.shape, 2 if of_keys else 3
        return products.gather(ctx.dim, view_index(index, products.shape, ctx.dim))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Sum the gradients of equal rows."""
        refuse_second_order("blocked")
        (index,) = ctx.saved_tensors
        sums = grad.new_zeros(ctx.shape)
        return sums.scatter_add_(ctx.dim, view_index(index, ctx.shape, ctx.dim), grad), None, None


class ByDistance(torch.autograd.Function):
    """Views numbers by distance as those of pairs."""

    @staticmethod
    def forward(ctx: Any, numbers: Tensor, queries: int) -> Tensor:
        """View ``(G, M + W - 1)`` as ``(G, M, W)``."""
        size = (numbers.size(0), queries, numbers.size(1) - queries + 1)
        return numbers.as_strided(size, (numbers.stride(0), 1, 1), numbers.storage_offset())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Sum the gradients of equal distances.

        Sums within tiles of queries come first: the whole, skewed at once, would be mostly zeros.
        """
        refuse_second_order("blocked")
        tile = math.gcd(grad.size(1), MAX_TILE)
        return _sum_skewed(_sum_skewed(grad.unflatten(1, (-1, tile)), 1), tile), None


class AddTiles(torch.autograd.Function):
    """Adds the tiles of a :class:`Band` to pairs in place; autograd would copy the pairs."""

    @staticmethod
    def forward(ctx: Any, pairs: Tensor, tiles: Tensor) -> Tensor:
        """Add ``(k, h, tiles, N, W)`` to ``(k, h, M, W)``."""
        ctx.shape = tiles.shape
        ctx.mark_dirty(pairs)
        pairs.view(tiles.shape).add_(tiles)
        return pairs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradient of both."""
        return grad, grad.view(ctx.shape)


class Multiply(torch.autograd.Function):
    """Multiplies pairs; saves the factors and none of the products between them."""

    @staticmethod
    def forward(ctx: Any, content: Tensor, *factors: Tensor) -> Tensor:
        """Multiply ``(k, h, M, W)`` with one or two more of the same shape."""
        ctx.save_for_backward(content, *factors)
        product = content * factors[0]
        return product.mul_(factors[1]) if len(factors) == 2 else product

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        """Multiply the gradient with all other factors."""
        refuse_second_order("blocked")
        content, *factors = ctx.saved_tensors
        by_content = grad * content
        if len(factors) == 1:
            return grad * factors[0], by_content
        first, second = factors
        return (grad * first).mul_(second), by_content * second, by_content.mul_(first)


def view_index(index: Tensor, shape: torch.Size, dim: int) -> Tensor:
    """View an index by distance, ``(M + W - 1,)``, as that of pairs, ``(k, h, M, W)``.

    Args:
        index: of the distances of a block.
        shape: that of pairs, but in one dimension.
        dim: this dimension.
    """
    size = list(shape)
    size[dim] = len(index) - shape[5 - dim] + 1
    return index.as_strided(size, (0, 0, 1, 1), index.storage_offset())


def _tile(x: Tensor, rows: Tensor) -> Tensor:
    """Reshape ``(k, h, n, D)`` to ``(G, tiles, k * h / G * N, D)``: a product for all heads."""
    x = x.flatten(0, 1).unflatten(1, (-1, _tile_size(x.size(2))))  # [k * h, tiles, N, D]
    return x.unflatten(0, (rows.size(0), -1)).transpose(1, 2).flatten(2, 3)


def _restore(tiles: Tensor, like: Tensor) -> Tensor:
    """Undo :func:`_tile`: ``(k, h, n, D)``, the shape of ``like``."""
    tiles = tiles.unflatten(2, (-1, _tile_size(like.size(2))))  # [G, tiles, k * h / G, N, D]
    return tiles.transpose(1, 2).reshape(like.shape)


def _tile_size(tokens: int) -> int:
    return math.gcd(tokens, MAX_TILE)


def _window(rows: Tensor, tokens: int) -> Tensor:
    """View the rows of each tile of tokens, ``(G, tiles, N + others - 1, D)``; they overlap."""
    groups, count, width = rows.shape
    tile = _tile_size(tokens)
    size = (groups, tokens // tile, tile + count - tokens, width)
    strides = (rows.stride(0), tile * rows.stride(1), rows.stride(1), rows.stride(2))
    return rows.as_strided(size, strides, rows.storage_offset())


def _unskew(skewed: Tensor, x: Tensor) -> Tensor:
    """View pairs ``(k, h, tiles, N, others)`` in the products ``(G, tiles, k * h / G * N, rows)``.

    With a table for each head, a block has one sentence.
    """
    groups, tiles, stacked, rows = skewed.shape
    size = x.size(2) // tiles
    to_next_head = size * rows if groups == 1 else tiles * stacked * rows
    shape = (*x.shape[:2], tiles, size, rows - size + 1)
    strides = (to_next_head * x.size(1), to_next_head, stacked * rows, rows + 1, 1)
    return skewed.as_strided(shape, strides)


def _skew(pairs: Tensor, x: Tensor, rows: Tensor) -> Tensor:
    """Copy pairs ``(k, h, n, others)`` to the columns of their rows, with zeros elsewhere."""
    tile = _tile_size(x.size(2))
    stacked = x.size(0) * x.size(1) // rows.size(0) * tile
    width = tile + rows.size(1) - x.size(2)
    skewed = pairs.new_zeros(rows.size(0), x.size(2) // tile, stacked, width)
    _unskew(skewed, x).copy_(pairs.unflatten(2, (-1, tile)))
    return skewed


def _sum_tiles(skewed: Tensor, x: Tensor, rows: Tensor) -> Tensor:
    """Sum tokens by the skewed pairs of each row, ``(G, M + W - 1, D)``."""
    total = torch.zeros_like(rows)
    by_tile = skewed.mT @ _tile(x, rows)  # [G, tiles, N + others - 1, D]
    tile = _tile_size(x.size(2))
    for index in range(by_tile.size(1)):  # one by one, since neighbouring tiles share rows
        total[:, index * tile : index * tile + by_tile.size(2)] += by_tile[:, index]
    return total


def _transpose(pairs: Tensor) -> Tensor:
    """Copy ``(k, h, n, others)`` to ``(k, h, others, n)``.

    All heads are laid side by side as one matrix, which torch transposes several times faster than
    it reads a transposed view of several.
    """
    heads = pairs.flatten(0, 1)
    stacked = heads.movedim(0, -2).reshape(-1, len(heads) * pairs.size(-1))  # [n, k * h * others]
    return stacked.t().contiguous().view(*pairs.shape[:2], pairs.size(3), pairs.size(2))


def _sum_skewed(x: Tensor, step: int) -> Tensor:
    """Sum the rows of ``(..., N, W)``, each moved by ``step`` from the one before."""
    *outer, rows, width = x.shape
    skewed = x.new_zeros(*outer, rows, (rows - 1) * step + width)
    *strides, to_next, _ = skewed.stride()
    skewed.as_strided(x.shape, (*strides, to_next + step, 1)).copy_(x)
    return skewed.sum(-2)  # [..., (N - 1) * step + W]
