"""Slow, obvious float64 formulas of every position encoding, one function each.

The tests hold the package against these functions, so they are written to be compared with the
equations of the papers line by line: plain loops over heads, queries, keys and coordinates, one
sentence at a time, no padding, no broadcasting. They import nothing from the package. Every loop
works on tensor elements, so autograd gives the reference gradients too.

Score oracles share one signature, `name(q, k, params, options)`, and loop over `pairs`:

* `q` [heads, tgt_len, head_dim] and `k` [heads, src_len, head_dim]: float64 projections, before
  any scaling.
* The queries are the last `tgt_len` of the `src_len` positions: query t is at position
  `src_len - tgt_len + t` (`tgt_len == src_len` in a full pass, 1 when decoding step by step).
* The result [heads, tgt_len, src_len] holds the scores before any mask and before the softmax.
* `params` holds float64 tensors. A table is [groups, rows, head_dim] (vectors) or [groups, rows]
  (scalars); groups is 1 if the heads share it, else the number of heads. Distance r = j - i,
  clipped to [-K, K] with K = options["max_distance"], is found in row r + K.
* options["reset"]: two more rows end the table, theta_1 in row 2K+1 (query at position 0) and
  theta_2 in row 2K+2 (key at position 0, query elsewhere).
* options["scale_factor"]: c in sqrt(c * head_dim); its default depends on the method.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable, Iterator
from itertools import product

import torch
from torch import Tensor, dot


def clip(x: int, limit: int) -> int:
    """Return max(-limit, min(limit, x))."""
    return max(-limit, min(limit, x))


def row_times_matrix(a: Tensor, matrix: Tensor) -> Tensor:
    """Return a W: coordinate s is sum_t a_t W_ts."""
    return torch.stack([dot(a, matrix[:, s]) for s in range(matrix.shape[1])])


def matrix_times_column(matrix: Tensor, a: Tensor) -> Tensor:
    """Return W a: coordinate s is sum_t W_st a_t."""
    return torch.stack([dot(matrix[s], a) for s in range(matrix.shape[0])])


def of_head(table: Tensor, head: int) -> Tensor:
    """Return the part of a table that a head uses: its own one, or the one that all share."""
    return table[0] if table.shape[0] == 1 else table[head]


def row(i: int, j: int, options: dict) -> int:
    """Return the table row for the query at position i and the key at position j."""
    limit = options["max_distance"]
    if options.get("reset", False):
        if i == 0:
            return 2 * limit + 1
        if j == 0:
            return 2 * limit + 2
    return clip(j - i, limit) + limit


def scale(head_dim: int, options: dict, default: float) -> float:
    """Return sqrt(c * head_dim)."""
    return math.sqrt(options.get("scale_factor", default) * head_dim)


def zeros(q: Tensor, k: Tensor) -> Tensor:
    """Return scores of 0, [heads, tgt_len, src_len]."""
    return torch.zeros(q.shape[0], q.shape[1], k.shape[1], dtype=torch.float64)


def pairs(q: Tensor, k: Tensor) -> Iterator[tuple[int, int, int, int]]:
    """Yield head h, query t with its position i, and key j, which is at position j."""
    heads, tgt_len, src_len = zeros(q, k).shape
    for h, t, j in product(range(heads), range(tgt_len), range(src_len)):
        yield h, t, src_len - tgt_len + t, j


def score_rows(
    q: Tensor, k: Tensor, params: dict, options: dict, score: Callable[..., Tensor], c: float = 1
) -> Tensor:
    """Score pairs by a function of q_i, k_j and the row a_r of their distance, over sqrt(c d)."""
    scores = zeros(q, k)
    for h, t, i, j in pairs(q, k):
        a_r = of_head(params["table"], h)[row(i, j, options)]
        scores[h, t, j] = score(q[h, t], k[h, j], a_r) / scale(q.shape[-1], options, c)
    return scores


# ------------------------------------------------------------------------------------------ scores


def none(q: Tensor, k: Tensor, params: dict, options: dict) -> Tensor:
    """Plain attention: e_ij = q_i.k_j / sqrt(c d), c = 1 (Vaswani et al. 2017)."""
    scores = zeros(q, k)
    for h, t, _, j in pairs(q, k):
        scores[h, t, j] = dot(q[h, t], k[h, j]) / scale(q.shape[-1], options, 1)
    return scores


def shaw(q: Tensor, k: Tensor, params: dict, options: dict) -> Tensor:
    """e_ij = (q_i.k_j + q_i.a_r) / sqrt(c d), c = 1 (Shaw et al. 2018)."""
    return score_rows(q, k, params, options, lambda q, k, a: dot(q, k) + dot(q, a))


def raffel(q: Tensor, k: Tensor, params: dict, options: dict) -> Tensor:
    """e_ij = (q_i.k_j + a_r) / sqrt(c d), a_r scalar, c = 1 (Huang et al. on Raffel et al.)."""
    scores = zeros(q, k)
    for h, t, i, j in pairs(q, k):
        tables = params["table"].chunk(options.get("axes", 1))  # text is at r on all axes
        a_r = sum(of_head(table, h)[row(i, j, options)] for table in tables)
        scores[h, t, j] = (dot(q[h, t], k[h, j]) + a_r) / scale(q.shape[-1], options, 1)
    return scores


def t5_bucket(
    distance: int, bidirectional: bool = True, num_buckets: int = 32, max_distance: int = 128
) -> int:
    """Return the bucket of distance r = j - i (Raffel et al. 2020, as in their code).

    Both directions: half of the buckets for keys at or before the query, half for later keys.
    One direction: later keys all count as distance 0. In the buckets of one direction, the first
    half holds one distance each, the second half grows logarithmically up to `max_distance`;
    all that is further shares the last one.
    """
    offset = 0
    if bidirectional:
        num_buckets //= 2
        if distance > 0:
            offset = num_buckets
        steps = abs(distance)
    else:
        steps = max(-distance, 0)
    exact = num_buckets // 2
    if steps < exact:
        return offset + steps
    rest = num_buckets - exact
    # Bucket `exact + n` starts at exact * (max / exact)^(n / rest); whole numbers are not rounded.
    power = steps**rest
    started = [n for n in range(1, rest) if power * exact**n >= max_distance**n * exact**rest]
    return offset + exact + len(started)


def t5(q: Tensor, k: Tensor, params: dict, options: dict) -> Tensor:
    """e_ij = q_i.k_j / sqrt(c d) + b[bucket(r), head], c = 1 (Raffel et al. 2020).

    params["table"] is [axes * heads, buckets]. Distances are bucketed, not clipped. Options:
    `bidirectional` (True), `num_buckets` (32), `max_distance` (128, that of the buckets).
    """
    names = ("bidirectional", "num_buckets", "max_distance")
    given = {name: options[name] for name in names if name in options}
    scores = none(q, k, params, options)
    for h, t, i, j in pairs(q, k):
        bucket = t5_bucket(j - i, **given)
        tables = params["table"].chunk(options.get("axes", 1))  # text is at r on all axes
        scores[h, t, j] += sum(table[h, bucket] for table in tables)
    return scores


def alibi_slopes(heads: int) -> list[float]:
    """Return the slope of each head (Press et al. 2022).

    For a power of two: the geometric sequence that starts with, and has the ratio, 2^(-8/heads).
    Otherwise: the slopes of the next smaller power of two p, then every other slope
    (the 1st, 3rd, 5th ...) of 2p until each head has one.
    """
    power = 2 ** int(math.log2(heads))
    slopes = [2 ** (-8 / power * (n + 1)) for n in range(power)]
    return slopes + [2 ** (-8 / (2 * power) * (2 * n + 1)) for n in range(heads - power)]


def alibi(q: Tensor, k: Tensor, params: dict, options: dict) -> Tensor:
    """e_ij = q_i.k_j / sqrt(c d) - slope_h |j - i|, c = 1 (Press et al. 2022).

    options["mode"]: "asymmetric" gives later keys the slopes of the heads in reverse order. The
    distance is not clipped.
    """
    mode = options.get("mode", "symmetric")
    if mode not in ("symmetric", "asymmetric"):
        raise ValueError(f"mode {mode!r} is neither 'symmetric' nor 'asymmetric'")
    slopes = alibi_slopes(len(q))
    scores = none(q, k, params, options)
    for h, t, i, j in pairs(q, k):
        slope = slopes[len(q) - 1 - h] if mode == "asymmetric" and j > i else slopes[h]
        scores[h, t, j] -= options.get("axes", 1) * slope * abs(j - i)
    return scores


def m1(q: Tensor, k: Tensor, params: dict, options: dict) -> Tensor:
    """e_ij = (q_i.k_j a_|r|) / sqrt(c d), a scalar, c = 1 (Huang et al. 2020, method 1).

    params["table"] is [groups, K + 1]: row |r|. No reset is defined for it.
    """
    if options.get("reset", False):
        raise ValueError("no reset is defined for m1")
    scores = zeros(q, k)
    for h, t, i, j in pairs(q, k):
        a_r = of_head(params["table"], h)[abs(clip(j - i, options["max_distance"]))]
        scores[h, t, j] = dot(q[h, t], k[h, j]) * a_r / scale(q.shape[-1], options, 1)
    return scores


def m2(q: Tensor, k: Tensor, params: dict, options: dict) -> Tensor:
    """e_ij = (q_i.k_j a_r) / sqrt(c d), a_r scalar, c = 1 (Huang et al. 2020, method 2)."""
    return score_rows(q, k, params, options, lambda q, k, a: dot(q, k) * a)


def m3(q: Tensor, k: Tensor, params: dict, options: dict) -> Tensor:
    """e_ij = sum_s q_is k_js a_rs / sqrt(c d), a_r vector, c = 1 (Huang et al. 2020, method 3)."""

    def score(q: Tensor, k: Tensor, a: Tensor) -> Tensor:
        return torch.stack([q[s] * k[s] * a[s] for s in range(len(a))]).sum()

    return score_rows(q, k, params, options, score)


def m4(q: Tensor, k: Tensor, params: dict, options: dict) -> Tensor:
    """e_ij = (q_i.k_j + q_i.a_r + k_j.a_r) / sqrt(c d), c = 1 (Huang et al. 2020, method 4)."""
    return score_rows(q, k, params, options, lambda q, k, a: dot(q, k) + dot(q, a) + dot(k, a))


def m4m(q: Tensor, k: Tensor, params: dict, options: dict) -> Tensor:
    """e_ij = (q_i.k_j) (q_i.a_r) (k_j.a_r) / sqrt(c d), c = 1 (Huang et al. 2021, M4M)."""
    return score_rows(q, k, params, options, lambda q, k, a: dot(q, k) * dot(q, a) * dot(k, a))


def deberta(q: Tensor, k: Tensor, params: dict, options: dict) -> Tensor:
    """e_ij = (q_i.k_j + q_i.(a_r W_R) + k_j.(a_r W_T)) / sqrt(c d), c = 3 (He et al. 2021).

    params: "table", "query_projection" W_R and "key_projection" W_T, [head_dim, head_dim] each.
    options["tie_projections"]: W_R serves as W_T too. Theta_1 and theta_2 of the reset are rows
    of the table, so they pass through the projections like the others.
    """
    w_r = params["query_projection"]
    w_t = w_r if options.get("tie_projections", False) else params["key_projection"]

    def score(q: Tensor, k: Tensor, a: Tensor) -> Tensor:
        of_query, of_key = dot(q, row_times_matrix(a, w_r)), dot(k, row_times_matrix(a, w_t))
        return dot(q, k) + of_query + of_key

    return score_rows(q, k, params, options, score, c=3)


def tupe(q: Tensor, k: Tensor, params: dict, options: dict) -> Tensor:
    """e_ij = (q_i.k_j + (p_i U_Q).(p_j U_K)) / sqrt(c d) + b_r, c = 2 (Ke et al. 2021).

    params: "positions" p [n, head_dim], "query_projection" U_Q, "key_projection" U_K
    [head_dim, head_dim] each, "table" b (scalars). options["tie_projections"]: U_Q serves as U_K
    too. With the reset, theta replaces everything but the content term:
    e_ij = q_i.k_j / sqrt(c d) + theta.
    """
    head_dim = q.shape[-1]
    p = params["positions"]
    u_q = params["query_projection"]
    u_k = u_q if options.get("tie_projections", False) else params["key_projection"]
    reset = options.get("reset", False)
    scores = none(q, k, params, {"scale_factor": 2, **options})
    for h, t, i, j in pairs(q, k):
        scores[h, t, j] += of_head(params["table"], h)[row(i, j, options)]
        if not (reset and (i == 0 or j == 0)):
            absolute = dot(row_times_matrix(p[i], u_q), row_times_matrix(p[j], u_k))
            scores[h, t, j] += absolute / scale(head_dim, options, 2)
    return scores


def transformer_xl(q: Tensor, k: Tensor, params: dict, options: dict) -> Tensor:
    """e_ij = ((q_i + u).k_j + (q_i + v).(W s_{i-j})) / sqrt(c d), c = 1 (Dai et al. 2019).

    The distance keeps the sign of the paper: i - j, from the key to the query, positive for keys
    before the query. s is the interleaved sinusoid of that distance, as wide as the model
    (embed_dim = heads * head_dim), not clipped. params: "projection" W [embed_dim, embed_dim],
    applied as W s (s a column, as a linear layer with weight W does); head h owns the coordinates
    h * head_dim to (h + 1) * head_dim of the result; "u" and "v" [heads, head_dim].
    """
    heads, _, head_dim = q.shape
    src_len = k.shape[1]
    u, v = params["u"], params["v"]
    projected = {}
    for distance in range(-src_len, src_len + 1):  # i - j
        s = sinusoid(distance, heads * head_dim)
        projected[distance] = matrix_times_column(params["projection"], s)
    scores = zeros(q, k)
    for h, t, i, j in pairs(q, k):
        w_s = projected[i - j][h * head_dim : (h + 1) * head_dim]
        total = dot(q[h, t] + u[h], k[h, j]) + dot(q[h, t] + v[h], w_s)
        scores[h, t, j] = total / scale(head_dim, options, 1)
    return scores


def kerple(q: Tensor, k: Tensor, params: dict, options: dict) -> Tensor:
    """e_ij = q_i.k_j / sqrt(c d) - r1_h log(1 + r2_h |i - j|), c = 1 (Chi et al. 2022, log).

    params: "r1" and "r2" [heads], positive. The distance is not clipped.
    """
    r1, r2 = params["r1"], params["r2"]
    scores = none(q, k, params, options)
    for h, t, i, j in pairs(q, k):
        scores[h, t, j] -= r1[h] * torch.log(1 + r2[h] * abs(i - j))
    return scores


def sandwich(q: Tensor, k: Tensor, params: dict, options: dict) -> Tensor:
    """e_ij = q_i.k_j / sqrt(c d) + (p_i.p_j - w/2) / (8 h / H), c = 1 (Chi et al. 2023).

    p are sinusoids of width w = options["width"] (128) with the exponents 2s/w, s = 1 .. w/2, so
    that p_i.p_j = sum_s cos((i - j) / 10000^(2s/w)): 0 lies at i = j, all other biases are
    negative. h = 1 .. H numbers the heads. The distance is not clipped.
    """
    width = options.get("width", 128)
    scores = none(q, k, params, options)
    for h, t, i, j in pairs(q, k):
        compression = 8 * (h + 1) / len(q)
        product = 0.0
        for s in range(1, width // 2 + 1):
            frequency = 1 / 10000 ** (2 * s / width)
            product += math.sin(i * frequency) * math.sin(j * frequency)
            product += math.cos(i * frequency) * math.cos(j * frequency)
        scores[h, t, j] += (product - width / 2) / compression
    return scores


def tupe_shared(q: Tensor, k: Tensor, params: dict, options: dict) -> Tensor:
    """e_ij = (q_i.k_j + (W_Q p_i).(W_K p_j)) / sqrt(c d) + b[head, bucket], c = 2 (TUPE's code).

    p are the layer-normalized rows of params["positions"] [n+1, embed_dim]; the token at position
    i has row i + 1. params["query_weight"], "key_weight" [embed_dim, embed_dim] with biases, split
    over heads; "buckets" [heads, num_buckets + 1], T5's for both directions. With the reset:
    theta_1 = (row 0 with row 0) + bucket 16, theta_2 = (row 1 with row 1) + the extra bucket.
    """
    head_dim = q.shape[-1]
    buckets, furthest = options.get("num_buckets", 32), options.get("max_distance", 128)
    queries, keys = [], []
    for p in params["positions"]:
        mean = p.mean()
        normed = (p - mean) / torch.sqrt(((p - mean) ** 2).mean() + 1e-5)
        normed = normed * params["norm_weight"] + params["norm_bias"]
        queries.append(matrix_times_column(params["query_weight"], normed) + params["query_bias"])
        keys.append(matrix_times_column(params["key_weight"], normed) + params["key_bias"])
    scores = zeros(q, k)
    for h, t, i, j in pairs(q, k):
        own = slice(h * head_dim, (h + 1) * head_dim)
        rows, bucket = (i + 1, j + 1), t5_bucket(j - i, True, buckets, furthest)
        if options.get("reset", False) and i == 0:
            rows, bucket = (0, 0), buckets // 2
        elif options.get("reset", False) and j == 0:
            rows, bucket = (1, 1), buckets
        total = dot(q[h, t], k[h, j]) + dot(queries[rows[0]][own], keys[rows[1]][own])
        scores[h, t, j] = total / scale(head_dim, options, 2)
        scores[h, t, j] = scores[h, t, j] + params["buckets"][h, bucket]
    return scores


def fire(q: Tensor, k: Tensor, params: dict, options: dict) -> Tensor:
    """e_ij = q_i.k_j / sqrt(c d) + f(psi(i - j) / psi(max(i, L))) (Li et al. 2024).

    psi(x) = log(1 + |c'| x), L = |params["length"]| times options["threshold"] (512); f is one
    hidden layer of ReLUs with an output for each head. Later keys count as distance 0.
    """
    c, threshold = abs(params["curvature"]), abs(params["length"]) * options.get("threshold", 512)
    scores = none(q, k, params, options)
    for h, t, i, j in pairs(q, k):
        x = torch.log(1 + c * max(i - j, 0)) / torch.log(1 + c * max(i, threshold))
        hidden = torch.clamp(params["hidden_weight"][:, 0] * x + params["hidden_bias"], min=0)
        bias = dot(params["output_weight"][h], hidden)
        scores[h, t, j] += bias + params["output_bias"][h]
    return scores


def deberta_v2(q: Tensor, k: Tensor, params: dict, options: dict) -> Tensor:
    """e_ij = (q_i.k_j + q_i.(W_K p_b) + k_j.(W_Q p_b)) / sqrt(c d), c = 3 (DeBERTa's code).

    b is the bucket of i - j: itself up to buckets/2, then logarithmic up to max_positions. p are
    layer-normalized (epsilon 1e-7). options["project_query"] and ["project_key"] are the layer's
    projections, functions of a row [embed_dim]; by default they change nothing.
    """
    head_dim = q.shape[-1]
    buckets = options.get("buckets", 256)
    half = buckets // 2
    length = max(options["max_positions"], half + 2)
    project_query = options.get("project_query", lambda row: row)
    project_key = options.get("project_key", lambda row: row)
    scores = zeros(q, k)
    for h, t, i, j in pairs(q, k):
        bucket = abs(i - j)
        if bucket > half:
            grown = math.log(bucket / half) / math.log((length - 1) / half) * (half - 1)
            bucket = half + math.ceil(grown)
        bucket = bucket if i >= j else -bucket
        p = params["table"][max(0, min(2 * buckets - 1, bucket + buckets))]
        mean = p.mean()
        p = (p - mean) / torch.sqrt(((p - mean) ** 2).mean() + 1e-7)
        p = p * params["norm_weight"] + params["norm_bias"]
        own = slice(h * head_dim, (h + 1) * head_dim)
        for_query, for_key = project_key(p)[own], project_query(p)[own]
        total = dot(q[h, t], k[h, j]) + dot(q[h, t], for_query) + dot(k[h, j], for_key)
        scores[h, t, j] = total / scale(head_dim, options, 3)
    return scores


def fox(q: Tensor, k: Tensor, params: dict, options: dict) -> Tensor:
    """e_ij = q_i.k_j / sqrt(d) + sum_{t=j+1..i} log f_t (Lin et al. 2025, section 3).

    f_t = sigmoid(w_h.x_t + b_h). Later keys: sum_{t=i+1..j} log f'_t, of rows h + heads of w and b,
    where there are any. params: "gate" [heads or 2 heads, C] and "gate.bias"; options: "inputs", x
    of all tokens [S, C] (zeros).
    """
    heads, _, head_dim = q.shape
    src_len = k.shape[1]
    w, b = params["gate"], params["gate.bias"]
    x = options.get("inputs")
    if x is None:
        x = torch.zeros(src_len, w.shape[1], dtype=torch.float64)
    scores = zeros(q, k)
    for h, n, i, j in pairs(q, k):
        kept = torch.zeros((), dtype=torch.float64)
        for t in range(min(i, j) + 1, max(i, j) + 1):
            row = h + heads if j > i and len(b) > heads else h
            kept = kept + torch.log(torch.sigmoid(dot(w[row], x[t]) + b[row]))
        if j > i and len(b) == heads:  # which no query of a causal model sees
            kept = -kept
        scores[h, n, j] = dot(q[h, n], k[h, j]) / math.sqrt(head_dim) + kept
    return scores


def inkling(q: Tensor, k: Tensor, params: dict, options: dict) -> Tensor:
    """e_ij = q_i.k_j / sqrt(d) + (W_h x_i).p_r, p_r = 0 for r <= -E (Inkling, 2026).

    r = j - i. params: "projection" W [heads * rank, C]; "table" [E, rank], p_r of r = 1 - E .. 0,
    or [2 E - 1, rank], up to r = E - 1, beyond which p_r = 0, too. Options: "extent" E (1024, or
    "max_positions" if that is less); "inputs", x of the last tokens [S, C] (zeros).
    """
    _, tgt_len, head_dim = q.shape
    w, table = params["projection"], params["table"]
    rank = table.shape[1]
    extent = options.get("extent") or min(1024, options["max_positions"])
    x = options.get("inputs")
    if x is None:
        x = torch.zeros(tgt_len, w.shape[1], dtype=torch.float64)
    scores = zeros(q, k)
    for h, n, i, j in pairs(q, k):
        scores[h, n, j] = dot(q[h, n], k[h, j]) / math.sqrt(head_dim)
        place = j - i + extent - 1
        if 0 <= place < len(table):
            for c in range(rank):
                state = dot(w[h * rank + c], x[len(x) - tgt_len + n])
                scores[h, n, j] = scores[h, n, j] + state * table[place, c]
    return scores


def pope(q: Tensor, k: Tensor, params: dict, options: dict) -> Tensor:
    """e_ij = sum_t mu(q_it) mu(k_jt) cos((j - i) theta_t + delta_ht) / sqrt(d) (arXiv:2509.10534).

    mu = softplus, theta_t = base^(-t / d) for t = 0 .. d - 1, delta clamped to [-2 pi, 0].
    params: "delta" [heads, d]; options: "base" (10000).
    """
    head_dim = q.shape[-1]
    scores = zeros(q, k)
    for h, n, i, j in pairs(q, k):
        total = torch.zeros((), dtype=torch.float64)
        for t in range(head_dim):
            theta = options.get("base", 10000) ** (-t / head_dim)
            delta = params["delta"][h, t].clamp(-2 * math.pi, 0)
            lengths = torch.log1p(q[h, n, t].exp()) * torch.log1p(k[h, j, t].exp())
            total = total + lengths * torch.cos((j - i) * theta + delta)
        scores[h, n, j] = total / math.sqrt(head_dim)
    return scores


def cope(q: Tensor, k: Tensor, params: dict, options: dict) -> Tensor:
    """e_ij = z_ij + (1 - f) q_i.E[floor p] + f q_i.E[ceil p] (Golovneva et al. 2024, section 4).

    z_ij = q_i.k_j / sqrt(d), p = min(sum_{t=j..i} sigmoid(z_it), P - 1), f = p - floor p. A key
    after the query, which no causal model sees, has p = 0. Keys that a query does not see, between
    the first ones and its window, count nothing. params: "table" [P, d]; options: "visible" [T, S]
    of bool, by default all.
    """
    table, z = params["table"], none(q, k, {}, {})
    visible = options.get("visible", torch.ones(z.shape[1:], dtype=torch.bool))
    scores = zeros(q, k)
    for h, n, i, j in pairs(q, k):
        counted = [t for t in range(j, i + 1) if visible[n, t]]
        p = sum((torch.sigmoid(z[h, n, t]) for t in counted), 0 * z[h, n, j])
        p = torch.minimum(p, torch.full_like(p, len(table) - 1))
        low = math.floor(float(p.detach()))
        f = p - low
        row = (1 - f) * table[low] + f * table[min(low + 1, len(table) - 1)]
        scores[h, n, j] = z[h, n, j] + dot(q[h, n], row)
    return scores


SCORES = {
    formula.__name__: formula
    for formula in (
        *(none, shaw, raffel, t5, alibi, m1, m2, m3, m4, m4m, deberta, tupe, transformer_xl),
        *(kerple, sandwich, tupe_shared, fire, deberta_v2, fox, inkling, pope, cope),
    )
}
SCORES["shaw_values"] = none  # the scores stay as they are; see shaw_values below


# --------------------------------------------------------------------------------------- rotations


def rotated_width(head_dim: int, options: dict) -> int:
    """Count the leading coordinates that are rotated: int(fraction * head_dim), even."""
    width = int(options.get("fraction", 1.0) * head_dim)
    if width % 2:
        raise ValueError(f"{width} of {head_dim} coordinates cannot be rotated in pairs")
    return width


def rotation_pair(t: int, width: int, options: dict) -> tuple[int, int]:
    """Return the two coordinates of pair t: neighbors, or the same place in both halves."""
    layout = options.get("layout", "interleaved")
    if layout == "interleaved":
        return 2 * t, 2 * t + 1
    if layout == "half":
        return t, t + width // 2
    raise ValueError(f"layout {layout!r} is neither 'interleaved' nor 'half'")


def rope_frequency(t: int, width: int, options: dict) -> float:
    """Return the angle by which pair t of `width` rotated coordinates turns at each position.

    Without scaling: base^(-2t / width). options["scaling"]:

    * "linear:F": positions are divided by F (position interpolation).
    * "ntk:F": the base becomes base * F^(width / (width - 2)), so that the fastest pair keeps
      its frequency and the slowest one is divided by F.
    * "yarn:F" (Peng et al. 2023, in the form that Hugging Face computes): pairs that turn more
      than 32 times (beta_fast) in the original length options["max_positions"] (length) keep
      their frequency, pairs that turn less than once (beta_slow) are divided by F, with a linear
      ramp over the pairs between; its ends are whole numbers unless truncate=false.
    * "dynamic:F": as ntk, with F n / length - (F - 1) in place of F where the model has room for
      n = options["max_positions"] > length positions.
    * "llama3:F": wavelengths below length / high (4) stay, those above length / low (1) are
      multiplied by F, with a line in 1 / wavelength between.
    * "longrope:F:short=...:long=...": each pair has a divisor of its own, from the second list
      where the model has room for more than length positions.
    * "proportional:F:part=p": the first int(p width // 2) pairs turn, divided by F; no other.

    Settings follow the factor, as in "yarn:4:beta_fast=16:length=512". options["axes"]: the pairs
    of each axis are adjacent and have frequencies of their own, or, with options["pairs"] =
    "alternating", every so many of all frequencies.
    """
    base, axes = options.get("base", 10000.0), options.get("axes") or 1
    if axes > 1 and options.get("pairs") == "alternating":
        axis, place = divmod(t, width // 2 // axes)
        t = place * axes + axis
    elif axes > 1 and options.get("pairs", "blocks") == "blocks" and not options.get("sections"):
        width = width // axes
        t = t % (width // 2)
    kind, factor, settings = read_scaling(options)
    length = int(settings.get("length", options.get("max_positions", 0)))
    if kind == "none":
        return base ** (-2 * t / width)
    if kind == "dynamic":
        n = options["max_positions"]
        grown = factor * n / length - (factor - 1) if n > length else 1.0
        return (base * grown ** (width / (width - 2))) ** (-2 * t / width)
    if kind == "llama3":
        frequency = base ** (-2 * t / width)
        wavelength = 2 * math.pi / frequency
        few, many = float(settings.get("low", 1)), float(settings.get("high", 4))
        if wavelength < length / many:
            return frequency
        if wavelength > length / few:
            return frequency / factor
        smooth = (length / wavelength - few) / (many - few)
        return (1 - smooth) * frequency / factor + smooth * frequency
    if kind == "longrope":
        divisors = settings["long" if options["max_positions"] > length else "short"].split("/")
        return base ** (-2 * t / width) / float(divisors[t])
    if kind == "proportional":
        turning = int(float(settings.get("part", 1)) * width // 2)
        return base ** (-2 * t / width) / factor if t < turning else 0.0
    if kind == "linear":
        return base ** (-2 * t / width) / factor
    if kind == "ntk":
        return (base * factor ** (width / (width - 2))) ** (-2 * t / width)
    if kind == "yarn":
        # The (real) pair number at which a pair turns `turns` times in the original length.
        fast, slow = (
            width * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))
            for turns in (float(settings.get("beta_fast", 32)), float(settings.get("beta_slow", 1)))
        )
        if settings.get("truncate") != "false":
            fast, slow = math.floor(fast), math.ceil(slow)
        low = max(fast, 0)
        high: float = min(slow, width - 1)
        if low == high:
            high += 0.001
        ramp = min(max((t - low) / (high - low), 0), 1)  # 0: as trained, 1: divided by F
        trained = base ** (-2 * t / width)
        return trained * (1 - ramp) + trained / factor * ramp
    raise ValueError(f"unknown scaling {options['scaling']!r}")


def read_scaling(options: dict) -> tuple[str, float, dict[str, str]]:
    """Split options["scaling"] into its kind, its factor and its settings."""
    kind, *rest = options.get("scaling", "none").split(":")
    return kind, float(rest[0] if rest else 1), dict(setting.split("=") for setting in rest[1:])


def rope_attention_factor(options: dict) -> float:
    """Compute the factor of cosines and sines: 1, but for YaRN and LongRoPE.

    It is the setting attention_factor, if there is one. YaRN: 0.1 ln(F) + 1, or that with a factor
    mscale over that with a factor mscale_all_dim. LongRoPE: sqrt(1 + ln F / ln length).
    """
    kind, factor, settings = read_scaling(options)
    if kind not in ("yarn", "longrope"):
        return 1.0
    if "attention_factor" in settings:
        return float(settings["attention_factor"])
    if kind == "longrope":
        length = int(settings.get("length", options.get("max_positions", 0)))
        return math.sqrt(1 + math.log(factor) / math.log(length))
    if "mscale" in settings and "mscale_all_dim" in settings:
        above, below = (
            0.1 * float(settings[name]) * math.log(factor) + 1
            for name in ("mscale", "mscale_all_dim")
        )
        return above / below
    return 0.1 * math.log(factor) + 1.0


def rope(x: Tensor, positions: list[int] | Tensor, options: dict) -> Tensor:
    """Rotate x [heads, length, head_dim] by its positions (Su et al. 2021).

    Pair (a, b) is the complex number a + ib and is multiplied by e^(i pos frequency). Options:
    `base` (10000), `fraction` (1.0: the first int(fraction * head_dim) coordinates are rotated,
    the others pass through), `layout` ("interleaved" or "half"), `scaling` ("none", "linear:F",
    "ntk:F", "yarn:F" with `max_positions`). Frequencies and halves are those of the rotated part.
    """
    heads, length, head_dim = x.shape
    width = rotated_width(head_dim, options)
    rotated = x.clone()
    for h, n, t in product(range(heads), range(length), range(width // 2)):
        first, second = rotation_pair(t, width, options)
        angle = int(positions[n]) * rope_frequency(t, width, options)
        turn = rope_attention_factor(options) * cmath.exp(1j * angle)
        z = torch.complex(x[h, n, first], x[h, n, second]) * turn
        rotated[h, n, first] = z.real
        rotated[h, n, second] = z.imag
    return rotated


def lerope(x: Tensor, positions: list[int] | Tensor, options: dict) -> Tensor:
    """Rotate x [heads, length, head_dim] as `rope`, with trained frequencies (Mistral Large 4).

    Pair t turns by the angle position * frequency_t * exp(alpha_t). Options beside those of `rope`:
    `alpha` [width / 2].
    """
    heads, length, head_dim = x.shape
    width = rotated_width(head_dim, options)
    alpha = options["alpha"].double()
    rotated = x.clone()
    for h, n, t in product(range(heads), range(length), range(width // 2)):
        first, second = rotation_pair(t, width, options)
        angle = int(positions[n]) * rope_frequency(t, width, options) * torch.exp(alpha[t])
        cos, sin = (rope_attention_factor(options) * f(angle) for f in (torch.cos, torch.sin))
        a, b = x[h, n, first], x[h, n, second]
        rotated[h, n, first] = a * cos - b * sin
        rotated[h, n, second] = a * sin + b * cos
    return rotated


def xpos(x: Tensor, positions: list[int] | Tensor, options: dict) -> Tensor:
    """Rotate and rescale x [heads, length, head_dim] by its positions (Sun et al. 2022).

    As `rope`, and pair t of queries is multiplied by zeta_t^(pos / scale_base), that of keys
    (options["keys"]) by zeta_t^(-pos / scale_base), with zeta_t = (2t / width + g) / (1 + g). So a
    key at distance i - j before the query counts zeta_t^((i - j) / scale_base), 1 at most. Options
    beside those of `rope`: `keys` (False), `scale_base` (512), `gamma` g (0.4).
    """
    heads, length, head_dim = x.shape
    width = rotated_width(head_dim, options)
    gamma = options.get("gamma", 0.4)
    sign = -1 if options.get("keys", False) else 1
    rescaled = rope(x, positions, options).clone()
    for h, n, t in product(range(heads), range(length), range(width // 2)):
        zeta = (2 * t / width + gamma) / (1 + gamma)
        decay = zeta ** (sign * int(positions[n]) / options.get("scale_base", 512))
        for coordinate in rotation_pair(t, width, options):
            rescaled[h, n, coordinate] = rescaled[h, n, coordinate] * decay
    return rescaled


# ---------------------------------------------------------------------------- inputs and positions


def sinusoid(position: int, dim: int) -> Tensor:
    """Return the interleaved sinusoid of one position (or signed distance): [dim].

    PE[2s] = sin(pos / 10000^(2s/dim)), PE[2s+1] = cos(pos / 10000^(2s/dim)).
    """
    values = []
    for coordinate in range(dim):
        s = coordinate // 2
        angle = position / 10000 ** (2 * s / dim)
        values.append(math.sin(angle) if coordinate % 2 == 0 else math.cos(angle))
    return torch.tensor(values, dtype=torch.float64)


def sinusoidal(length: int, dim: int) -> Tensor:
    """Return the interleaved sinusoids of positions 0 .. length-1: [length, dim]."""
    return torch.stack([sinusoid(position, dim) for position in range(length)])


def sinusoidal_half(length: int, dim: int) -> Tensor:
    """Return the sinusoids of positions 0 .. length-1 as fairseq builds them: [length, dim].

    All sines first, then all cosines; the frequencies are 10000^(-s / (dim/2 - 1)), so the last
    one is 1/10000 exactly; an odd dim ends with a zero. Row p belongs to the number p: fairseq
    looks its first real token up in row padding_idx + 1.
    """
    half = dim // 2
    table = torch.zeros(length, dim, dtype=torch.float64)
    for position in range(length):
        for s in range(half):
            frequency = 10000 ** (-s / (half - 1))
            table[position, s] = math.sin(position * frequency)
            table[position, half + s] = math.cos(position * frequency)
    return table


def block_positions(tokens: Tensor, pad: int) -> Tensor:
    """Return the position of each token [batch, length] or [length]; padding has -1.

    Only real tokens count, from 0, wherever the padding is.
    """
    if tokens.dim() == 1:
        return block_positions(tokens[None], pad)[0]
    positions = torch.full_like(tokens, -1)
    for b in range(tokens.shape[0]):
        real = [n for n in range(tokens.shape[1]) if tokens[b, n] != pad]
        for position, n in enumerate(real):
            positions[b, n] = position
    return positions


def sentence_positions(tokens: Tensor, pad: int, eos: int) -> Tensor:
    """Return each token's real position in its sentence; padding has -1.

    Huang et al. (2021), section 5.2: "the first token of a sentence always has the position of 1".
    What a row begins with, <s>, belongs to no sentence and has position 0. A sentence ends with its
    end-of-sentence symbol.
    """
    if tokens.dim() == 1:
        return sentence_positions(tokens[None], pad, eos)[0]
    positions = torch.full_like(tokens, -1)
    for b in range(tokens.shape[0]):
        first, *text = [n for n in range(tokens.shape[1]) if tokens[b, n] != pad]
        positions[b, first] = 0
        sentences: list[list[int]] = [[]]
        for n in text:
            sentences[-1].append(n)
            if tokens[b, n] == eos:
                sentences.append([])
        for sentence in sentences:
            for real_position, n in enumerate(sentence, start=1):
                positions[b, n] = real_position
    return positions


# ----------------------------------------------------------------------------- masks and attention


def allowed(
    direction: str, tgt_len: int, src_len: int, key_padding: Tensor | None = None
) -> Tensor:
    """Return which key each query may see: bool [tgt_len, src_len].

    direction: "both", "lr" (j <= i) or "rl" (j >= i); the queries are the last tgt_len positions.
    key_padding: bool [src_len], True for padding, which no query sees.
    """
    if direction not in ("both", "lr", "rl"):
        raise ValueError(f"direction {direction!r} is none of 'both', 'lr', 'rl'")
    mask = torch.zeros(tgt_len, src_len, dtype=torch.bool)
    for t in range(tgt_len):
        i = src_len - tgt_len + t
        for j in range(src_len):
            is_padding = key_padding is not None and bool(key_padding[j])
            is_hidden = (direction == "lr" and j > i) or (direction == "rl" and j < i)
            mask[t, j] = not (is_padding or is_hidden)
    return mask


def attention_weights(scores: Tensor, allowed: Tensor) -> Tensor:
    """Return the softmax over the allowed keys: [heads, tgt_len, src_len].

    Keys that are not allowed have weight 0; so has every key of a query that may see none.
    """
    heads, tgt_len, src_len = scores.shape
    weights = torch.zeros(heads, tgt_len, src_len, dtype=torch.float64)
    for h, t in product(range(heads), range(tgt_len)):
        keys = [j for j in range(src_len) if allowed[t, j]]
        weights[h, t, keys] = torch.softmax(scores[h, t, keys], dim=0)
    return weights


def attention(scores: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    """Return sum_j weight_ij v_j, [heads, tgt_len, head_dim]; zeros for a query without keys."""
    return attention_weights(scores, allowed) @ v


def shaw_values(scores: Tensor, v: Tensor, allowed: Tensor, params: dict, options: dict) -> Tensor:
    """Return sum_j weight_ij (v_j + a^V_r), the value half of Shaw et al. 2018.

    params["value_table"] is [groups, rows, head_dim], indexed like the score table.
    """
    weights = attention_weights(scores, allowed)
    out = torch.zeros(*scores.shape[:2], v.shape[2], dtype=torch.float64)
    for h, t, i, j in pairs(scores, v):
        a_r = of_head(params["value_table"], h)[row(i, j, options)]
        out[h, t] = out[h, t] + weights[h, t, j] * (v[h, j] + a_r)
    return out


# -------------------------------------------------------------------------------- parameter counts


def parameter_count(name: str, m: int, n: int, d: int, D: int, h: int, **options) -> int:
    """Return the number of position parameters of a whole model (one stack).

    m layers, n positions, head width d, model width D, h heads. `name` may join encodings with
    "+" ("learned+m4m", "tupe+reset"). Options: `max_distance` K (n - 1), `per_head` (every head
    has its own table; projections and TUPE's position vectors stay shared), `reset`,
    `tie_projections`, `num_buckets` (32, t5). Learned positions count the n rows that real tokens
    can use, none that a library reserves for padding.
    """
    parts = name.split("+")
    if "reset" in parts:
        parts.remove("reset")
        options["reset"] = True
    if len(parts) > 1:
        # The reset belongs to the one part that has distances.
        inputs = [part for part in parts if part in ("none", "learned", "sentence_learned")]
        others = [part for part in parts if part not in inputs]
        total = sum(parameter_count(part, m, n, d, D, h) for part in inputs)
        return total + sum(parameter_count(part, m, n, d, D, h, **options) for part in others)

    name = parts[0]
    limit = options.get("max_distance", n - 1)  # K
    groups = h if options.get("per_head", False) else 1
    thetas = 2 if options.get("reset", False) else 0
    projections = 1 if options.get("tie_projections", False) else 2
    rows = 2 * limit + 1 + thetas
    counts = {
        **dict.fromkeys(("none", "sinusoidal", "alibi", "rope", "xpos", "sandwich"), 0),
        **dict.fromkeys(("learned", "sentence_learned"), n * D),
        **dict.fromkeys(("shaw", "m3", "m4", "m4m", "shaw_values"), m * groups * rows * d),
        **dict.fromkeys(("raffel", "m2"), m * groups * rows),
        "lerope": d // 2,
        "t5": options.get("num_buckets", 32) * h,
        "m1": m * groups * (limit + 1),
        "deberta": m * (groups * rows * d + projections * d * d),
        "tupe": m * (n * d + projections * d * d + groups * rows),
        "transformer_xl": m * (D * D + 2 * D),
        "kerple": m * 2 * h,
        "tupe_shared": (n + 1) * D + 2 * D + 2 * (D * D + D) + 33 * h,
        "fire": m * (2 * 32 + h * 32 + h + 2),
        "deberta_v2": 2 * 256 * D + 2 * D,
        "fox": 2 * m * h * (D + 1),  # of an encoder
        "inkling": m * 16 * (h * D + 2 * options.get("extent", min(1024, n)) - 1),  # of an encoder
        "pope": m * h * d,
        "cope": m * options.get("positions", 64) * d,
    }
    return counts[name]
