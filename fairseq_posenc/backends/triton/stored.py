# ruff: noqa: ANN001, ANN201, SIM102 (an `if` of constants is decided while compiling)
"""Gradients from stored tiles: of queries, of keys by their table, and of tables by distance.

Tiles hold the gradient of a part of the score for each pair. A row belongs to a token and has a
column for each token of the other side: rows are queries and columns keys (SIGN is 1), or, for the
key term, the reverse (SIGN is -1). Read with a stride that is longer by one, every row begins one
column later, and one column has one distance: of rows ``abc | def``, the columns of stride 4 are
``a e``, ``b f``. From column to column, distances grow by SIGN. So the rows of a table have columns
side by side, in their order if SIGN is 1, else from the last row to the first.

Rows at the ends of a clipped table also serve all distances beyond it. Their gradients are sums of
a token's tiles there, its two *ends*, of columns before the table's and after: ``tokens_kernel``
stores them, then ``tables_kernel`` reads them. A block of N rows reads all columns that one of them
may see: ``backward_kernel`` stores whole tiles, whose sides N divides, with zeros for hidden pairs.

- ``slab``: the ``sequences`` from ``sequence`` on; ``queries`` and ``keys``, their padded lengths.
- ``side``: a ``table``, its ``tiles`` and ``ends``, the SIGN of these, and the ``factor`` of their
  sums; ``tokens``, the queries or keys that its rows are multiplied by (None for numbers); and
  the gradients to write, ``table_grad`` ``(copies, H, last + 1, D or nothing)`` and ``token_grad``.
- ``tiles``, ``ends``: of one sequence; a block of them has N rows and N columns. ``stride``:
  columns of a row of tiles. Sequence: index of a sentence and a head, ``batch * heads + head``.
- ``table``: ``low``, its first row's distance (index of key minus query); ``last``, its last index.
- ``problem``, ``opt``: the call's tensors and sizes, constants; T queries, S keys, W: D, padded.
"""

import triton
import triton.language as tl

from fairseq_posenc.backends.triton.tiles import (
    find_columns,
    load_rows,
    load_table,
    multiply,
    split_program,
    store_rows,
)


@triton.jit
def find_offset(side):
    """Find the first of the table's columns in row 0 of the tiles; each row has it one later."""
    return side.table.low if side.SIGN > 0 else -side.table.low - side.table.last


@triton.jit
def load_tile(opt, tiles, stride, row, column, start, end, SKEW: tl.constexpr):
    """Load ``(N, N)`` from a row and column on, with zeros for columns not in ``start .. end``.

    With SKEW 1, every row begins one column later than the row before it.
    """
    i = tl.arange(0, opt.N)[:, None]
    j = i * SKEW + tl.arange(0, opt.N)[None, :]
    inside = (column + j >= start) & (column + j < end)
    first = tl.cast(row, tl.int64) * stride + column
    return tl.load(tiles + first + (i * stride + j), inside, 0.0)


@triton.jit
def add_ends(problem, opt, side, total, tiles, stride, ends, head, row, start, end):
    """Add the ends of N rows, multiplied by the rows at the table's ends; also store the ends."""
    i = row + tl.arange(0, opt.N)
    offset = row + find_offset(side)
    last = side.table.last
    first_column = offset + tl.arange(0, opt.N)[:, None]  # of the table in each row, [N, 1]
    before = tl.zeros((opt.N, opt.N), tl.float32)
    after = tl.zeros((opt.N, opt.N), tl.float32)
    stop = tl.minimum(first_column, end)
    for column in range(start, tl.minimum(end, offset + opt.N - 1), opt.N):  # left of the table
        before += load_tile(opt, tiles, stride, row, column, start, stop, SKEW=0)
    begin = tl.maximum(first_column + last + 1, start)
    for column in range(tl.maximum(offset + last + 1, start) // opt.N * opt.N, end, opt.N):
        after += load_tile(opt, tiles, stride, row, column, begin, end, SKEW=0)
    before, after = tl.sum(before, 1), tl.sum(after, 1)
    tl.store(ends + i * 2, before)
    tl.store(ends + i * 2 + 1, after)
    of_before = (0 if side.SIGN > 0 else last) + tl.zeros((1,), tl.int32)  # index of a table's row
    total += before[:, None] * load_table(problem, opt, side.table, head, of_before)
    return total + after[:, None] * load_table(problem, opt, side.table, head, last - of_before)


@triton.jit
def add_table_term(problem, opt, side, total, tiles, stride, head, row, start, end):
    """Add the products of N rows of tiles and the rows of a table, ``(N, W)``."""
    offset = row + find_offset(side)
    last = side.table.last
    # The table's columns end one later in every row.
    stop = tl.minimum(offset + tl.arange(0, opt.N)[:, None] + last + 1, end)
    first = tl.maximum(start - offset - opt.N + 1, 0) // opt.N * opt.N
    for step in range(first, tl.minimum(last + 1, end - offset), opt.N):
        tile = load_tile(opt, tiles, stride, row, offset + step, start, stop, SKEW=1)
        place = step + tl.arange(0, opt.N)  # which of the table's columns
        index = last - place if side.SIGN < 0 else place  # of the table's rows
        total = multiply(tile, load_table(problem, opt, side.table, head, index), total)
    return total


@triton.jit
def write_tokens(problem, opt, slab, side, content, program):
    """Write the gradients of N queries, or add the table's term to N keys' gradients.

    ``content`` holds the tiles of queries times keys; None for keys: ``backward_kernel`` has them.
    """
    tokens = problem.tgt_len if side.SIGN > 0 else problem.src_len  # in a sequence
    rows, stride = (slab.queries, slab.keys) if side.SIGN > 0 else (slab.keys, slab.queries)
    sequence_in_slab, row = split_program(program, tokens, opt.N)
    sequence = (slab.sequence + sequence_in_slab).to(tl.int64)
    batch, head = sequence // problem.heads, sequence % problem.heads
    start, end = find_columns(problem, opt, batch, row, side.SIGN)
    earlier = sequence_in_slab.to(tl.int64) * slab.queries * slab.keys  # pairs before its own
    grad = side.token_grad + sequence * tokens * problem.width
    total = tl.zeros((opt.N, opt.W), tl.float32)
    if content is not None:
        keys = problem.key + sequence * problem.src_len * problem.width
        for column in range(start, end, opt.N):
            x = load_rows(problem, opt, keys, column, problem.src_len, opt.N)  # [N, W]
            tile = load_tile(opt, content + earlier, slab.keys, row, column, start, end, SKEW=0)
            total = multiply(tile, x, total)
    if side.table is not None:
        tiles = side.tiles + earlier
        total = add_table_term(problem, opt, side, total, tiles, stride, head, row, start, end)
        if problem.CLIPPED:
            ends = side.ends + sequence_in_slab * rows * 2
            total = add_ends(problem, opt, side, total, tiles, stride, ends, head, row, start, end)
    total *= problem.scale * problem.kept_factor  # which tiles leave out; 1 / (1 - p) of dropout
    if content is None:
        total += load_rows(problem, opt, grad, row, tokens, opt.N)
    store_rows(problem, opt, grad, total, row, tokens, opt.N)


@triton.jit
def tokens_kernel(problem, opt, slab, content, queries, keys):
    """Write the gradients of queries; add the key table's term to keys' gradients.

    The first programs are for queries, the others for keys.
    """
    program = tl.program_id(0)
    programs = slab.sequences * tl.cdiv(problem.tgt_len, opt.N)
    if program < programs:
        write_tokens(problem, opt, slab, queries, content, program)
    if problem.key_table is not None:
        if program >= programs:
            write_tokens(problem, opt, slab, keys, None, program - programs)


@triton.jit
def add_to_table(problem, opt, slab, side, copies, program):
    """Add to N rows of one copy of a table's gradient, for one head.

    Copy c sums each ``copies``-th sentence of the slab; ``program`` counts by copy, head and row.
    """
    last = side.table.last
    group, step = split_program(program, last + 1, opt.N)
    copy, head = group // problem.heads, group % problem.heads
    offset = find_offset(side) + step  # the block's first column in row 0 of the tiles
    tokens = problem.tgt_len if side.SIGN > 0 else problem.src_len
    others = problem.src_len if side.SIGN > 0 else problem.tgt_len
    rows, stride = (slab.queries, slab.keys) if side.SIGN > 0 else (slab.keys, slab.queries)
    # Row r needs the columns from r + offset to r + offset + N - 1: blocks without any are skipped.
    first_row = tl.maximum(-offset - 2 * (opt.N - 1), 0) // opt.N * opt.N
    end_row = tl.minimum(tokens, others - offset)
    place = step + tl.arange(0, opt.N)  # which of the table's columns
    by_vector = tl.zeros((opt.N, opt.W), tl.float32)
    by_number = tl.zeros((opt.N,), tl.float32)
    # The slab's first sequence of this head and copy; the next one lies `copies` sentences later.
    first = (head - slab.sequence % problem.heads + problem.heads) % problem.heads
    first += copy * problem.heads
    for sequence_in_slab in range(first, slab.sequences, copies * problem.heads):
        sequence = slab.sequence + sequence_in_slab
        tiles = side.tiles + tl.cast(sequence_in_slab, tl.int64) * slab.queries * slab.keys
        token = tl.cast(sequence, tl.int64) * tokens * problem.width
        for row in range(first_row, end_row, opt.N):
            start, end = find_columns(problem, opt, sequence // problem.heads, row, side.SIGN)
            tile = load_tile(opt, tiles, stride, row, row + offset, start, end, SKEW=1)
            if side.tokens is None:  # a table of numbers
                by_number += tl.sum(tile.to(tl.float32), 0)
            else:
                y = load_rows(problem, opt, side.tokens + token, row, tokens, opt.N)
                by_vector = multiply(tl.trans(tile), y, by_vector)  # [distances N, W]
        if problem.CLIPPED and side.tokens is not None:  # tables of numbers have all distances
            if (step == 0) | (step + opt.N > last):  # the block has an end of the table
                for row in range(0, tokens, opt.N):
                    y = load_rows(problem, opt, side.tokens + token, row, tokens, opt.N)
                    ends = side.ends + (sequence_in_slab * rows + row + tl.arange(0, opt.N)) * 2
                    before = tl.sum(tl.load(ends)[:, None] * y, 0)[None, :]  # [1, W]
                    after = tl.sum(tl.load(ends + 1)[:, None] * y, 0)[None, :]
                    by_vector += tl.where(place[:, None] == 0, before, 0.0)
                    by_vector += tl.where(place[:, None] == last, after, 0.0)
    index = last - place if side.SIGN < 0 else place  # of the table's rows
    grad_row = (group * (last + 1) + index).to(tl.int64)  # of the gradient, which has all copies
    inside = place <= last
    if side.tokens is None:
        pointers = side.table_grad + grad_row
        total = by_number
    else:
        channel = tl.arange(0, opt.W)[None, :]
        pointers = side.table_grad + grad_row[:, None] * problem.width + channel
        inside = inside[:, None] & (channel < problem.width)
        total = by_vector
    total *= side.factor
    tl.store(pointers, tl.load(pointers, inside, 0.0) + total, inside)


@triton.jit
def tables_kernel(problem, opt, slab, sides, copies):
    """Add to the gradients of all tables, each by its own programs; see :func:`add_to_table`."""
    program = tl.program_id(0)
    for index in tl.static_range(len(sides)):  # not assigned, which would make SIGN a variable
        last = sides[index].table.last
        programs = copies * problem.heads * tl.cdiv(last + 1, opt.N)
        if (program >= 0) & (program < programs):
            add_to_table(problem, opt, slab, sides[index], copies, program)
        program -= programs
