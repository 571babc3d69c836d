# ruff: noqa: ANN001, ANN201
"""The forward pass, and the backward pass for keys and values.

The forward pass has a program for each block of M queries, over all keys that they may see. Source:
the online softmax of FlashAttention (Dao et al. 2022). Exponentials are powers of 2, so the scale
of the scores has log2 e as a factor.

The backward pass has a program for each block of N keys, over queries that see them. It stores the
gradients of the parts of scores in tiles, from which ``stored`` computes the others.

The parts of a score are ``content``, the dot product of query and key; its factor ``gain``; and the
products ``query_term`` and ``key_term`` of query and key with table rows. ``scores`` have no scale
yet: (content * gain + query_term + key_term) + bias / scale; with PRODUCT, the three are factors.

Dropout drops weights P with probability p; P' is 0 there, else P. As in FlashAttention, gradients
of scores are dS = P' dP / (1 - p) - P delta, where dP are those of the weights, and delta is the
sum of a query's attended values times their gradients. The kernels compute (1 - p) dS: delta, with
the shift in an int64 of ``statistics``, has a factor 1 - p. Sums get 1 / (1 - p), most the scale.

- ``problem``: tensors and sizes of the call: B batch, H heads, T queries, S keys, head size D.
- ``opt``: constants: M queries and N keys of a tile; W: D padded; FULL: no load needs a mask.
- ``slab``: the stored tiles: their first ``sequence``; ``queries`` and ``keys``, padded lengths.
- ``tiles``: where the gradients of each part are stored; None where they are not needed.
- BEFORE, AFTER: keys that are so far that a clipped table has its first or last row; NEAR: others.
"""

import triton
import triton.language as tl

from fairseq_posenc.backends.triton.tiles import (
    LOG2_E,
    NEAR,
    apply_mask,
    compute_scores,
    drop_weights,
    find_columns,
    load_rows,
    load_two_numbers,
    multiply,
    split_program,
    store_rows,
)

# The shift of a query that sees no key: finite, but so low that the backward pass has weights of 0.
NO_SUM = tl.constexpr(-1e30)


@triton.jit
def forward_kernel(problem, opt, attended, shifts):
    """Write attended values ``(B, H, T, D)``, and -log2 of sums of exponentials ``(B, H, T)``."""
    sequence, first_query = split_program(tl.program_id(0), problem.tgt_len, opt.M)
    batch, head = sequence // problem.heads, sequence % problem.heads
    earlier = sequence.to(tl.int64) * problem.tgt_len  # number of queries in earlier sequences
    query = problem.query + earlier * problem.width
    key_numbers = sequence.to(tl.int64) * problem.src_len * problem.width  # in earlier keys
    key, value = problem.key + key_numbers, problem.value + key_numbers
    q = load_rows(problem, opt, query, first_query, problem.tgt_len, opt.M)  # [M, W]
    m = first_query + tl.arange(0, opt.M)[:, None]  # [M, 1]
    sums = tl.zeros((opt.M, opt.W), tl.float32)
    total = tl.zeros((opt.M,), tl.float32)
    highest = tl.full((opt.M,), float("-inf"), tl.float32)
    scale = problem.scale * LOG2_E
    for part in tl.static_range(3):  # BEFORE, AFTER and NEAR
        if problem.CLIPPED or part == NEAR:
            start, end = find_columns(problem, opt, batch, first_query, SIGN=1, PART=part)
            for first_key in range(start, end, opt.N):
                n = first_key + tl.arange(0, opt.N)[None, :]  # [1, N]
                k = load_rows(problem, opt, key, first_key, problem.src_len, opt.N)
                _, _, _, _, scores = compute_scores(
                    problem, opt, q, k, head, first_query, first_key, FLIP=False, PART=part
                )
                # Masks come last: they are applied to the whole score, and never multiplied.
                scores = apply_mask(problem, opt, scores, batch, m, n, first_query, first_key)
                higher = tl.maximum(highest, tl.max(scores, 1))
                shift = tl.where(higher == float("-inf"), 0.0, higher) * scale  # avoids inf - inf
                weights = tl.exp2(scores * scale - shift[:, None])  # [M, N]
                rescale = tl.exp2(highest * scale - shift)  # of the sums so far
                total = total * rescale + tl.sum(weights, 1)
                highest = higher
                if problem.dropout is not None:  # dropped weights count in the softmax
                    weights = drop_weights(problem, opt, weights, sequence, m, n)
                # Loaded late to save registers; k and v are [N, W].
                v = load_rows(problem, opt, value, first_key, problem.src_len, opt.N)
                sums = multiply(weights.to(v.dtype), v, sums * rescale[:, None])
    sees_no_key = total == 0.0  # [M]
    factor = tl.where(sees_no_key, 0.0, problem.kept_factor) / tl.where(sees_no_key, 1.0, total)
    rows = attended + earlier * problem.width
    store_rows(problem, opt, rows, sums * factor[:, None], first_query, problem.tgt_len, opt.M)
    shift = -highest * scale - tl.log2(tl.where(sees_no_key, 1.0, total))
    shift = tl.where(sees_no_key, NO_SUM, shift)[:, None]
    tl.store(shifts + earlier + m, shift, mask=m < problem.tgt_len)


@triton.jit
def store_tile(tiles, start, row, stride, column, tile):
    """Store a tile at rows and columns from a start on; memory is allocated for whole tiles."""
    tl.store(tiles + start + (row * stride + column), tile.to(tiles.dtype.element_ty))


@triton.jit
def store_gradients(
    problem, opt, slab, tiles, parts, grad_score, sequence_in_slab, first_query, first_key
):
    """Store the gradients of the parts of ``tiles``; return the content's."""
    content, gain, query_term, key_term = parts
    m, n = tl.arange(0, opt.M)[None, :], tl.arange(0, opt.N)[:, None]
    sequence_start = sequence_in_slab.to(tl.int64) * slab.queries * slab.keys
    start = sequence_start + tl.cast(first_query, tl.int64) * slab.keys + first_key
    if tiles.bias is not None:
        store_tile(tiles.bias, start, m, slab.keys, n, grad_score)
    others = query_term * key_term if problem.PRODUCT else 1.0  # a missing term is 1
    grad_content = (grad_score * others * gain).to(tiles.content.dtype.element_ty)
    store_tile(tiles.content, start, m, slab.keys, n, grad_content)
    if tiles.gain is not None:
        store_tile(tiles.gain, start, m, slab.keys, n, grad_score * content * others)
    if tiles.query_term is not None:
        tile = grad_score * content * gain * key_term if problem.PRODUCT else grad_score
        store_tile(tiles.query_term, start, m, slab.keys, n, tile)
    if tiles.key_term is not None:
        tile = grad_score * content * gain * query_term if problem.PRODUCT else grad_score
        start_by_key = sequence_start + tl.cast(first_key, tl.int64) * slab.queries + first_query
        store_tile(tiles.key_term, start_by_key, n, slab.queries, m, tile)
    return grad_content


@triton.jit
def backward_kernel(problem, opt, grad_attended, statistics, slab, tiles, grad_key, grad_value):
    """Write the tiles, and the gradients of values and of keys without their table's term."""
    sequence_in_slab, first_key = split_program(tl.program_id(0), problem.src_len, opt.N)
    sequence = slab.sequence + sequence_in_slab
    batch, head = sequence // problem.heads, sequence % problem.heads
    earlier = sequence.to(tl.int64) * problem.tgt_len  # number of queries in earlier sequences
    query = problem.query + earlier * problem.width
    grads = grad_attended + earlier * problem.width
    key_numbers = sequence.to(tl.int64) * problem.src_len * problem.width  # in earlier keys
    # [keys N, W] each; tiles are flipped, so that their rows are keys.
    k = load_rows(problem, opt, problem.key + key_numbers, first_key, problem.src_len, opt.N)
    v = load_rows(problem, opt, problem.value + key_numbers, first_key, problem.src_len, opt.N)
    n = first_key + tl.arange(0, opt.N)[:, None]  # [keys N, 1]
    grad_k = tl.zeros((opt.N, opt.W), tl.float32)
    grad_v = tl.zeros((opt.N, opt.W), tl.float32)
    for part in tl.static_range(3):  # BEFORE, AFTER and NEAR
        if problem.CLIPPED or part == NEAR:
            start, end = find_columns(problem, opt, batch, first_key, SIGN=-1, PART=part)
            for first_query in range(start, end, opt.M):
                m = first_query + tl.arange(0, opt.M)[None, :]  # [1, queries M]
                q = load_rows(problem, opt, query, first_query, problem.tgt_len, opt.M)  # [M, W]
                content, gain, query_term, key_term, scores = compute_scores(
                    problem, opt, q, k, head, first_query, first_key, FLIP=True, PART=part
                )
                scores = apply_mask(problem, opt, scores, batch, m, n, first_query, first_key)
                # [queries M, W], loaded late to save registers.
                g = load_rows(problem, opt, grads, first_query, problem.tgt_len, opt.M)
                inside = m < problem.tgt_len
                shift, delta = load_two_numbers(opt, statistics + earlier + m, inside, tl.float32)
                if not opt.FULL:  # weights beyond the last query will be 0
                    shift, delta = tl.where(inside, shift, NO_SUM), tl.where(inside, delta, 0)
                weights = tl.exp2(scores * (problem.scale * LOG2_E) + shift)
                kept = weights
                if problem.dropout is not None:
                    kept = drop_weights(problem, opt, weights, sequence, m, n)
                grad_v = multiply(kept.to(v.dtype), g, grad_v)
                grad_weight = multiply(v, tl.trans(g))  # [keys N, queries M]
                grad_score = kept * grad_weight - weights * delta
                grad_content = store_gradients(
                    problem, opt, slab, tiles, (content, gain, query_term, key_term), grad_score,
                    sequence_in_slab, first_query, first_key,
                )  # fmt: skip
                grad_k = multiply(grad_content, q, grad_k)
    grad_k *= problem.scale * problem.kept_factor
    store_rows(problem, opt, grad_key + key_numbers, grad_k, first_key, problem.src_len, opt.N)
    grad_v *= problem.kept_factor
    store_rows(problem, opt, grad_value + key_numbers, grad_v, first_key, problem.src_len, opt.N)
