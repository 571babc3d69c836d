# ruff: noqa: ANN001, ANN201, SIM102 (an `if` of constants is decided while compiling)
"""Gradients from stored tiles: of queries, of keys by their table, and of tables by distance.

Tiles hold the gradient of a part of the score for each pair. A row belongs to a token and has a
column for each token of the other side: rows are queries and columns keys (SIGN is 1), or, for the
key term, the reverse (SIGN is -1). Read with a stride that is longer by one, every row begins one
column later, and one column has one distance: of rows ``abc | def``, the columns of stride 4 are
``a e``, ``b f``. From column to column, distances grow by SIGN.

Table rows at the ends also serve all distances beyond the table. Their gradients are the sums of a
token's tiles there, the token's *ends*: two numbers for each row of tiles, for the columns before
and for those after the ones of the table. They are None without ``opt.CLIPPED``.

``slab``, ``tiles`` and ``grads`` are NamedTuples of
:mod:`~fairseq_posenc.backends.triton.gradients`; ``problem`` and ``opt`` are those of
:mod:`~fairseq_posenc.backends.triton.tiles`, where a block has N rows and N columns. ``offset`` is
the column of row 0 that belongs to the table's first column. ADD: whether an earlier slab wrote
sums over other pairs, to which these are added.
"""

import triton
import triton.language as tl

from fairseq_posenc.backends.triton.tiles import (
    add_product,
    find_keys,
    find_queries,
    load_rows,
    load_table,
    split_program,
    store_rows,
)


@triton.jit
def find_columns(problem, opt, slab, batch, row, SIGN: tl.constexpr):
    """Find the columns of a block of rows whose tiles were stored, from a multiple of N on."""
    if SIGN < 0:
        start, end = find_queries(problem, batch, slab.first_key + row, opt.N, opt.N)
    else:
        start, end = find_keys(problem, batch, row, opt.N, opt.N)
        start = tl.maximum(start - slab.first_key, 0)
        end = tl.minimum(end - slab.first_key, slab.keys)
    return start, end


@triton.jit
def find_offset(table, slab, SIGN: tl.constexpr):
    """Find the column of row 0 that belongs to the table's first column.

    That is the first row of the table or, where distances fall, its last one.
    """
    return table.low - slab.first_key if SIGN > 0 else slab.first_key - table.low - table.last


@triton.jit
def load_tile(opt, tiles, row, column, stride, start, end, SKEW: tl.constexpr):
    """Load ``(N, N)`` from a row and column on, with zeros for columns not in ``start .. end``.

    With SKEW 1, every row begins one column later than the row before it.
    """
    i = tl.arange(0, opt.N)[:, None]
    at = column + i * SKEW + tl.arange(0, opt.N)[None, :]
    inside = (at >= start) & (at < end)
    return tl.load(tiles + (row + i).to(tl.int64) * stride + at, inside, 0.0)


@triton.jit
def add_ends(
    problem,
    opt,
    total,
    tiles,
    table,
    ends,
    head,
    row,
    stride,
    offset,
    start,
    end,
    SIGN: tl.constexpr,
):
    """Add the products of the ends of N rows with the rows at the table's ends; store the ends."""
    i = row + tl.arange(0, opt.N)
    first_column = i[:, None] + offset  # of the table, [N, 1]
    end_column = first_column + table.last + 1
    before = tl.zeros((opt.N,), tl.float32)
    after = tl.zeros((opt.N,), tl.float32)
    for column in range(start, tl.minimum(end, row + offset + opt.N - 1), opt.N):
        tile = load_tile(opt, tiles, row, column, stride, start, tl.minimum(first_column, end), 0)
        before += tl.sum(tile.to(tl.float32), 1)
    first = tl.maximum(row + offset + table.last + 1, start) // opt.N * opt.N
    for column in range(first, end, opt.N):
        tile = load_tile(opt, tiles, row, column, stride, tl.maximum(end_column, start), end, 0)
        after += tl.sum(tile.to(tl.float32), 1)
    tl.store(ends + i * 2, before)
    tl.store(ends + i * 2 + 1, after)
    low = (0 if SIGN > 0 else table.last) + tl.zeros((1,), tl.int32)
    total += before[:, None] * load_table(problem, opt, table, head, low)
    return total + after[:, None] * load_table(problem, opt, table, head, table.last - low)


@triton.jit
def add_table_term(
    problem,
    opt,
    total,
    tiles,
    table,
    ends,
    head,
    row,
    stride,
    offset,
    start,
    end,
    SIGN: tl.constexpr,
):
    """Add the products of N rows of tiles with the rows of a table, ``(N, W)``."""
    first = tl.maximum(start - row - offset - opt.N + 1, 0) // opt.N * opt.N
    last = tl.minimum(table.last + 1, end - row - offset)
    # The table's columns end one later in every row.
    end_column = row + offset + tl.arange(0, opt.N)[:, None] + table.last + 1
    for step in range(first, last, opt.N):
        column = row + offset + step
        tile = load_tile(opt, tiles, row, column, stride, start, tl.minimum(end_column, end), 1)
        index = step + tl.arange(0, opt.N)
        index = table.last - index if SIGN < 0 else index
        total = add_product(total, tile, load_table(problem, opt, table, head, index))
    if opt.CLIPPED:
        total = add_ends(
            problem, opt, total, tiles, table, ends, head, row, stride, offset, start, end, SIGN
        )
    return total


@triton.jit
def write_queries(problem, opt, slab, tiles, ends, grad_query, program, ADD: tl.constexpr):
    """Write the gradients of N queries."""
    sequence_in_slab, row = split_program(program, problem.tgt_len, opt.N)
    sequence = (slab.sequence + sequence_in_slab).to(tl.int64)
    batch, head = sequence // problem.heads, sequence % problem.heads
    start, end = find_columns(problem, opt, slab, batch, row, 1)
    grad = grad_query + sequence * problem.tgt_len * problem.width
    keys = problem.key + (sequence * problem.src_len + slab.first_key) * problem.width
    at = sequence_in_slab.to(tl.int64) * slab.queries * slab.keys
    total = tl.zeros((opt.N, opt.W), tl.float32)
    if ADD:
        total += load_rows(problem, opt, grad, row, problem.tgt_len, opt.N)
    for column in range(start, end, opt.N):
        # [N, W]
        x = load_rows(problem, opt, keys, column, problem.src_len - slab.first_key, opt.N)
        tile = load_tile(opt, tiles.content + at, row, column, slab.keys, start, end, 0)
        total = add_product(total, tile, x)
    if problem.query_table is not None:
        by_query = tiles.content if tiles.query_term is None else tiles.query_term
        own_ends = ends + sequence_in_slab * slab.queries * 2 if opt.CLIPPED else None
        table = problem.query_table
        offset = find_offset(table, slab, 1)
        total = add_table_term(
            problem, opt, total, by_query + at, table, own_ends, head, row, slab.keys, offset,
            start, end, 1,
        )  # fmt: skip
    store_rows(problem, opt, grad, total, row, problem.tgt_len, opt.N)


@triton.jit
def add_to_keys(problem, opt, slab, tiles, ends, grad_key, program):
    """Add the term of the key table to the gradients of N keys."""
    count = tl.minimum(problem.src_len - slab.first_key, slab.keys)
    sequence_in_slab, row = split_program(program, count, opt.N)
    sequence = (slab.sequence + sequence_in_slab).to(tl.int64)
    batch, head = sequence // problem.heads, sequence % problem.heads
    start, end = find_columns(problem, opt, slab, batch, row, -1)
    grad = grad_key + (sequence * problem.src_len + slab.first_key) * problem.width
    by_key = tiles.key_term + sequence_in_slab.to(tl.int64) * slab.queries * slab.keys
    own_ends = ends + sequence_in_slab * slab.keys * 2 if opt.CLIPPED else None
    offset = find_offset(problem.key_table, slab, -1)
    total = add_table_term(
        problem, opt, load_rows(problem, opt, grad, row, count, opt.N), by_key, problem.key_table,
        own_ends, head, row, slab.queries, offset, start, end, -1,
    )  # fmt: skip
    store_rows(problem, opt, grad, total, row, count, opt.N)


@triton.jit
def rows_kernel(
    problem, opt, slab, tiles, query_ends, key_ends, grad_query, grad_key, ADD: tl.constexpr
):
    """Write the gradients of queries; add the key table's term to those of keys.

    The first programs are for queries, the others for keys.
    """
    program = tl.program_id(0)
    programs = slab.sequences * tl.cdiv(problem.tgt_len, opt.N)
    if program < programs:
        write_queries(problem, opt, slab, tiles, query_ends, grad_query, program, ADD)
    if problem.key_table is not None:
        if program >= programs:
            add_to_keys(problem, opt, slab, tiles, key_ends, grad_key, program - programs)


@triton.jit
def sum_diagonal(
    problem,
    opt,
    slab,
    tiles,
    table,
    x,
    ends,
    grads,
    program,
    chunks,
    ADD: tl.constexpr,
    SIGN: tl.constexpr,
):
    """Write the gradient of N rows of a table, for one head and one chunk of the batch.

    Args:
        problem: see the module.
        opt: see the module.
        slab: see the module.
        tiles: gradients of the table's term.
        table: the table.
        x: what its vectors are multiplied by, queries or keys; None for a table of numbers.
        ends: of the tokens of rows, ``(sequences, rows, 2)``.
        grads: ``(chunks, H, R, D)`` of float32, or without D for numbers.
        program: index among the programs of this table, by chunk, head and N table rows.
        chunks: number of chunks.
        ADD: see the module.
        SIGN: see the module.
    """
    group, step = split_program(program, table.last + 1, opt.N)
    chunk, head = group // problem.heads, group % problem.heads
    offset = find_offset(table, slab, SIGN)
    rows, columns = (slab.queries, slab.keys) if SIGN > 0 else (slab.keys, slab.queries)
    tokens = problem.tgt_len if SIGN > 0 else problem.src_len  # of a sequence
    first_token = 0 if SIGN > 0 else slab.first_key
    count = tl.minimum(tokens - first_token, rows)
    first_row = tl.maximum(-offset - step - 2 * (opt.N - 1), 0) // opt.N * opt.N
    end_row = tl.minimum(count, columns - offset - step)
    column = step + tl.arange(0, opt.N)  # of the table
    by_vector = tl.zeros((opt.N, opt.W), tl.float32)
    by_number = tl.zeros((opt.N,), tl.float32)
    # The slab's first sequence of this head and chunk; then all others.
    first = (head - slab.sequence % problem.heads + problem.heads) % problem.heads
    first += chunk * problem.heads
    for sequence_in_slab in range(first, slab.sequences, chunks * problem.heads):
        sequence = slab.sequence + sequence_in_slab
        at = tl.cast(sequence_in_slab, tl.int64) * slab.queries * slab.keys
        token = tl.cast(sequence, tl.int64) * tokens + first_token
        for row in range(first_row, end_row, opt.N):
            start, end = find_columns(problem, opt, slab, sequence // problem.heads, row, SIGN)
            tile = load_tile(opt, tiles + at, row, row + offset + step, columns, start, end, 1)
            if x is None:
                by_number += tl.sum(tile.to(tl.float32), 0)
            else:
                y = load_rows(problem, opt, x + token * problem.width, row, count, opt.N)
                by_vector = add_product(by_vector, tl.trans(tile), y)  # [distances N, W]
        if opt.CLIPPED and x is not None:
            if (step == 0) | (step + opt.N > table.last):
                for row in range(0, count, opt.N):
                    y = load_rows(problem, opt, x + token * problem.width, row, count, opt.N)
                    i = (sequence_in_slab * rows + row + tl.arange(0, opt.N)) * 2
                    before = tl.sum(tl.load(ends + i)[:, None] * y, 0)[None, :]  # [1, W]
                    after = tl.sum(tl.load(ends + i + 1)[:, None] * y, 0)[None, :]
                    by_vector += tl.where(column[:, None] == 0, before, 0.0)
                    by_vector += tl.where(column[:, None] == table.last, after, 0.0)
    index = table.last - column if SIGN < 0 else column
    group_row = (group * (table.last + 1) + index).to(tl.int64)
    if x is None:
        inside = column <= table.last
        if ADD:
            by_number += tl.load(grads + group_row, inside, 0.0)
        tl.store(grads + group_row, by_number, inside)
    else:
        channel = tl.arange(0, opt.W)[None, :]
        inside = (column <= table.last)[:, None] & (channel < problem.width)
        place = grads + group_row[:, None] * problem.width + channel
        if ADD:
            by_vector += tl.load(place, inside, 0.0)
        tl.store(place, by_vector, inside)


@triton.jit
def tables_kernel(
    problem, opt, slab, tiles, query_ends, key_ends, grads, chunks, ADD: tl.constexpr
):
    """Write the gradients of all tables, each by its own programs; see :func:`sum_diagonal`."""
    program = tl.program_id(0)
    by_query = tiles.content if tiles.query_term is None else tiles.query_term
    for_bias = tiles.content if tiles.bias is None else tiles.bias
    groups = chunks * problem.heads
    if grads.query_table is not None:
        programs = groups * tl.cdiv(problem.query_table.last + 1, opt.N)
        if (program >= 0) & (program < programs):
            sum_diagonal(
                problem, opt, slab, by_query, problem.query_table, problem.query, query_ends,
                grads.query_table, program, chunks, ADD, 1,
            )  # fmt: skip
        program -= programs
    if grads.key_table is not None:
        programs = groups * tl.cdiv(problem.key_table.last + 1, opt.N)
        if (program >= 0) & (program < programs):
            sum_diagonal(
                problem, opt, slab, tiles.key_term, problem.key_table, problem.key, key_ends,
                grads.key_table, program, chunks, ADD, -1,
            )  # fmt: skip
        program -= programs
    if grads.gain is not None:
        programs = groups * tl.cdiv(problem.gain.last + 1, opt.N)
        if (program >= 0) & (program < programs):
            sum_diagonal(
                problem, opt, slab, tiles.gain, problem.gain, None, None, grads.gain, program,
                chunks, ADD, 1,
            )  # fmt: skip
        program -= programs
    if grads.bias is not None:
        if program >= 0:
            sum_diagonal(
                problem, opt, slab, for_bias, problem.bias, None, None, grads.bias, program,
                chunks, ADD, 1,
            )  # fmt: skip
