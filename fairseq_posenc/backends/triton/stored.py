# ruff: noqa: ANN001, ANN201
"""Gradients from stored tiles: of queries, keys or values, and of tables by distance.

Tiles hold a number for each pair: the gradient of a part of its score, or its weight.
A row of tiles belongs to a query i and has a column for each key j, with N zeros on either side.
Read with a stride that is longer by one, every row begins one step later, and one column has one
distance: of rows ``abc | def``, the columns of stride 4 are ``a e``, ``b f``. For tiles of the key
term, keys and queries change their roles: then distances fall from column to column (``SIGN`` is
-1).

Sequence: one head of one sentence. Slab: the sequences, or some keys of a single one, whose tiles
are stored together (:mod:`~fairseq_posenc.backends.triton.gradients`). A gradient is computed for
the token of each row of tiles, from the tokens of the columns.
"""

import triton
import triton.language as tl

from fairseq_posenc.backends.triton.matrices import load_rows, multiply, store_rows
from fairseq_posenc.backends.triton.relative_shift import load_table
from fairseq_posenc.backends.triton.tiles import find_block


@triton.jit
def load_tile(tiles, row, column, stride, N: tl.constexpr):
    """Load ``(N, N)`` as it was stored; ``column`` counts from the first after the zeros."""
    i = row + tl.arange(0, N)[:, None]
    return tl.load(tiles + i * stride + column + N + tl.arange(0, N)[None, :])


@triton.jit
def add_content(
    total,
    side,
    content,
    others,
    sequence_in_slab,
    row,
    TRANSPOSED: tl.constexpr,
    FULL: tl.constexpr,
    N: tl.constexpr,
    W: tl.constexpr,
):
    """Add products of tiles with keys, or of transposed tiles with queries, to ``(N, W)``."""
    tiles = content + (sequence_in_slab.to(tl.int64) * side.content_rows) * side.content_stride
    count = side.column_tokens - side.column_start
    for column in range(0, side.columns, N):
        x = load_rows(others, column, count, side.width, FULL, N, W)  # [N, W]
        if TRANSPOSED:
            tile = tl.trans(load_tile(tiles, column, row, side.content_stride, N))  # [N, N]
        else:
            tile = load_tile(tiles, row, column, side.content_stride, N)
        total += multiply(tile, x)
    return total


@triton.jit
def load_skewed_tile(tiles, row, column, stride, N: tl.constexpr):
    """Load ``(N, N)`` by row and distance; ``column`` counts from the first zero of ``row``."""
    i = tl.arange(0, N)[:, None]
    start = tiles + row * stride + column
    return tl.load(start + i * (stride + 1) + tl.arange(0, N)[None, :])


@triton.jit(do_not_specialize=["first_sequence"])
def rows_kernel(
    first_sequence,
    side,
    content,
    other,
    by_distance,
    table,
    grad,
    ADD: tl.constexpr,
    SIGN: tl.constexpr,
    FULL: tl.constexpr,
    N: tl.constexpr,
    W: tl.constexpr,
):
    """Write or add to the gradients of queries, keys or values, ``(sequences, row tokens, D)``.

    Args:
        first_sequence: the slab's first sequence.
        side: sizes, strides and first indices of rows and columns; its ``content_rows`` is the
            number of queries even if rows are keys
            (:class:`~fairseq_posenc.backends.triton.problem.Side`).
        content: tiles to be multiplied by ``other``, or None; transposed if rows are keys.
        other: keys, queries or gradients of outputs, ``(sequences, column tokens, D)``, or None.
        by_distance: tiles to be multiplied by the table, or None.
        table: vectors by distance, or None.
        grad: the gradients.
        ADD: whether ``grad`` holds gradients to add to.
        SIGN: 1 if distances grow along a row of tiles, else -1.
        FULL: whether all tiles are full, and D is a power of 2.
        N: rows and columns of a tile.
        W: D up to a power of 2.
    """
    sequence_in_slab, row = find_block(side.rows, N)
    sequence = (first_sequence + sequence_in_slab).to(tl.int64)
    width = side.width
    row_grad = grad + (sequence * side.row_tokens + side.row_start) * width
    tiles_offset = (sequence_in_slab.to(tl.int64) * side.rows) * side.stride
    total = tl.zeros((N, W), tl.float32)
    if ADD:
        total += load_rows(row_grad, row, side.row_end - side.row_start, width, FULL, N, W)
    if content is not None:
        others = other + (sequence * side.column_tokens + side.column_start) * width
        rows_are_keys: tl.constexpr = SIGN < 0
        total = add_content(
            total, side, content, others, sequence_in_slab, row, rows_are_keys, FULL, N, W
        )
    if table is not None:
        head = sequence % side.heads
        # The table row at the first of the N zeros before the block's first row of tiles.
        first_row = SIGN * (side.column_start - side.row_start - row - N)
        first_row += side.row_of_distance_zero
        for column in range(0, side.columns + N, N):
            tile = load_skewed_tile(by_distance + tiles_offset, row, column, side.stride, N)
            x = load_table(table, head, first_row + SIGN * column, SIGN, N, N, W)  # [N, W]
            total += multiply(tile, x)  # [N, W]
    total *= side.factor
    store_rows(row_grad, total, row, side.row_end - side.row_start, width, N, W)


@triton.jit(do_not_specialize=["first_sequence", "sequences", "heads", "chunks"])
def table_kernel(
    first_sequence,
    side,
    tiles,
    x,
    by_diagonal,
    sequences,
    heads,
    chunks,
    FULL: tl.constexpr,
    N: tl.constexpr,
    W: tl.constexpr,
):
    """Write the gradient of a table by head, chunk of the batch, and diagonal of blocks.

    A diagonal is the N x N skewed blocks that cover the same N distances: those whose column, in
    blocks, is ``offset`` after their row. Others are zeros alone. The caller adds up the chunks.

    Args:
        first_sequence: the slab's first sequence.
        side: see :class:`~fairseq_posenc.backends.triton.problem.Side`.
        tiles: gradients of the term.
        x: what the table's rows were multiplied by, ``(sequences, row tokens, D)``; None for
            scalars.
        by_diagonal: ``(heads, chunks, diagonals, N, D)`` of float32, or without D for scalars.
        sequences: of the slab.
        heads: of the slab, counted from its first sequence: H, or fewer if it has fewer sequences.
        chunks: parts of the batch.
        FULL: whether all tiles are full, and D is a power of 2.
        N: rows and columns of a tile.
        W: D up to a power of 2.
    """
    blocks = side.rows // N
    columns = side.columns // N
    diagonals = blocks + columns
    program = tl.program_id(0)
    offset = program % diagonals - blocks + 1
    chunk = program // diagonals % chunks
    head = program // diagonals // chunks
    first_block = tl.maximum(0, -offset)
    # A skewed row has one block more than it has columns, because it begins at the zeros.
    end_block = tl.minimum(blocks, columns + 1 - offset)
    # A multiple of `heads`, so that steps of `heads` stay with a head.
    chunk_sequences = tl.cdiv(sequences, heads * chunks) * heads
    by_vector = tl.zeros((N, W), tl.float32)
    by_scalar = tl.zeros((N, N), tl.float32)
    for step in range(
        chunk * chunk_sequences, tl.minimum(sequences - head, (chunk + 1) * chunk_sequences), heads
    ):
        sequence_in_slab = head + step
        row_offset = (
            (first_sequence + sequence_in_slab).to(tl.int64) * side.row_tokens + side.row_start
        ) * side.width
        tiles_offset = (sequence_in_slab.to(tl.int64) * side.rows) * side.stride
        for block in range(first_block, end_block):
            row = block * N
            column = row + offset * N
            tile = load_skewed_tile(tiles + tiles_offset, row, column, side.stride, N)
            if x is None:
                by_scalar += tile.to(tl.float32)
            else:
                count = side.row_end - side.row_start
                y = load_rows(x + row_offset, row, count, side.width, FULL, N, W)  # [N, W]
                by_vector += multiply(tl.trans(tile), y)  # [distances N, W]
    if x is None:
        tl.store(by_diagonal + program * N + tl.arange(0, N), tl.sum(by_scalar, 0))
    else:
        rows = by_diagonal + program.to(tl.int64) * N * side.width
        store_rows(rows, by_vector, 0, N, side.width, N, W)
