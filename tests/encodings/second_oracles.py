"""The encodings of 2024-2026 as loops over Python's floats, written from the papers alone.

They share nothing with the package nor with ``helpers/oracles.py``. A sentence has no padding here.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, cos, exp, floor, inf, log, log1p, pi, sin, sqrt
from operator import mul
from typing import Any, NamedTuple

Row = list[float]
Rows = list[Row]
State = dict[str, Any]  # a layer's parameters as lists


class Head(NamedTuple):
    """What a head knows of a sentence; ``sees[i]`` lists the keys that query i may see."""

    number: int
    q: Rows
    k: Rows
    x: Rows
    sees: list[list[int]]


Score = Callable[[Head, int, int], float]


def dot(a: Row, b: Row) -> float:
    return sum(map(mul, a, b))


def sigmoid(x: float) -> float:
    return 1 / (1 + exp(-x)) if x > 0 else exp(x) / (1 + exp(x))


def layer(
    x: Rows,
    state: State,
    heads: int,
    sees: list[list[int]],
    score: Score,
    factor: Callable[[int, int, int], float] = lambda head, i, keys: 1.0,
    sinks: Row | None = None,
) -> tuple[Rows, list[Rows]]:
    """Compute self-attention for a sentence, and the weights of each head.

    ``factor(head, i, n)`` multiplies all scores of query i, which sees n keys; exp(sink) is added
    to the sum of exponentials.
    """

    def projected(x: Rows, name: str) -> Rows:
        weight, bias = state[f"{name}_proj.weight"], state[f"{name}_proj.bias"]
        return [[dot(row, w) + b for w, b in zip(weight, bias)] for row in x]

    whole, d = [projected(x, name) for name in "qkv"], len(x[0]) // heads
    weights = [[[0.0] * len(x) for _ in x] for _ in range(heads)]
    attended: Rows = [[] for _ in x]
    for number in range(heads):
        q, k, v = ([row[number * d : number * d + d] for row in rows] for rows in whole)
        head = Head(number, q, k, x, sees)
        for i, keys in enumerate(sees):
            e = {j: score(head, i, j) * factor(number, i, len(keys)) for j in keys}
            total = sum(exp(value) for value in e.values()) + (exp(sinks[number]) if sinks else 0)
            for j in keys:
                weights[number][i][j] = exp(e[j]) / total
            attended[i] += [dot(weights[number][i], [row[t] for row in v]) for t in range(d)]
    return projected(attended, "out"), weights


def visible(length: int, causal: bool, window: float = inf) -> list[list[int]]:
    """Windows: W keys back, with the query's own; in an encoder W // 2 on either side."""
    if causal:
        return [[j for j in range(i + 1) if i - j < window] for i in range(length)]
    return [[j for j in range(length) if abs(i - j) <= window / 2] for i in range(length)]


def product(head: Head, i: int, j: int) -> float:
    return dot(head.q[i], head.k[j]) / sqrt(len(head.q[i]))


def plain(state: State) -> Score:
    return product


def fox(state: State) -> Score:
    """Lin et al. (2025): what the tokens after the key say is to be forgotten."""
    gate, bias = state["encodings.fox.gate.weight"], state["encodings.fox.gate.bias"]

    def score(head: Head, i: int, j: int) -> float:
        row = head.number  # of an encoder's gates the second half are for later keys
        row += len(head.x[0]) // len(head.q[0]) if j > i else 0
        between = range(min(i, j) + 1, max(i, j) + 1)
        gates = [sigmoid(dot(gate[row], head.x[t]) + bias[row]) for t in between]
        return product(head, i, j) + sum(log(f) for f in gates)

    return score


def inkling(state: State, extent: int) -> Score:
    """Inkling (2026): a token's few numbers mix curves over the distance to earlier keys."""
    weights, table = (state[f"encodings.inkling.{x}"] for x in ("projection.weight", "table"))

    def score(head: Head, i: int, j: int) -> float:
        rank = len(table[0])
        mine = weights[head.number * rank : (head.number + 1) * rank]
        mixture = [dot(w, head.x[i]) for w in mine]
        place = extent - 1 - (i - j)  # the last row of a causal table is the query's own
        curve = table[place] if 0 <= place < len(table) else [0.0] * rank
        return product(head, i, j) + dot(mixture, curve)

    return score


def pope(state: State, base: float = 10000.0) -> Score:
    """Gopalakrishnan et al. (2025): lengths from the content, angles from the position."""

    def score(head: Head, i: int, j: int) -> float:
        q, k, d, total = head.q[i], head.k[j], len(head.q[i]), 0.0
        for t, delta in enumerate(state["encodings.pope.delta"][head.number]):
            angle = (j - i) * base ** (-t / d) + min(max(delta, -2 * pi), 0)
            total += log1p(exp(q[t])) * log1p(exp(k[t])) * cos(angle)
        return total / sqrt(d)

    return score


def cope(state: State) -> Score:
    """Golovneva et al. (2024): the distance is the sum of gates from the key to the query."""
    table = state["encodings.cope.table"]

    def score(head: Head, i: int, j: int) -> float:
        gates = [sigmoid(product(head, i, t)) for t in head.sees[i] if j <= t <= i]
        p = min(sum(gates), len(table) - 1)
        below, above = dot(head.q[i], table[floor(p)]), dot(head.q[i], table[ceil(p)])
        return product(head, i, j) + (1 - (p - floor(p))) * below + (p - floor(p)) * above

    return score


def rope(w: Row, strength: float = 1, half: bool = False, places: list[int] | None = None) -> Score:
    """Su et al. (2021) with frequencies ``w``; ``strength`` multiplies cosines and sines."""

    def turned(row: Row, place: int) -> Row:
        row = list(row)
        for t, frequency in enumerate(w):
            a, b = (t, t + len(row) // 2) if half else (2 * t, 2 * t + 1)
            c, s = strength * cos(place * frequency), strength * sin(place * frequency)
            row[a], row[b] = row[a] * c - row[b] * s, row[b] * c + row[a] * s
        return row

    def score(head: Head, i: int, j: int) -> float:
        p_i, p_j = (places[i], places[j]) if places else (i, j)
        return dot(turned(head.q[i], p_i), turned(head.k[j], p_j)) / sqrt(len(head.q[i]))

    return score


# Frequencies of rope: width d, trained length L, the model's length n, factor F.


def unscaled(d: int, base: float = 1e4) -> Row:
    return [base ** (-2 * t / d) for t in range(d // 2)]


def dynamic(d: int, F: float, n: int, L: int, base: float = 1e4) -> Row:
    return unscaled(d, base if n <= L else base * (F * n / L - (F - 1)) ** (d / (d - 2)))


def yarn(
    d: int,
    F: float,
    L: int,
    turns: tuple[float, float] = (32, 1),
    cut: bool = True,
    base: float = 1e4,
) -> Row:
    low, high = (d * log(L / (b * 2 * pi)) / (2 * log(base)) for b in turns)
    if cut:
        low, high = floor(low), ceil(high)
    low, high = max(low, 0), min(high, d - 1)
    if low == high:
        high += 0.001
    ramps = [min(max((t - low) / (high - low), 0), 1) for t in range(d // 2)]
    return [w * (1 - ramp) + w / F * ramp for w, ramp in zip(unscaled(d, base), ramps)]


def yarn_strength(F: float, mscale: float = 1, all_dim: float | None = None) -> float:
    def m(s: float) -> float:
        return 0.1 * s * log(F) + 1 if F > 1 else 1

    return m(1) if all_dim is None else m(mscale) / m(all_dim)


def llama3(d: int, F: float, L: int, low: float, high: float, base: float = 1e4) -> Row:
    found = []
    for w in unscaled(d, base):
        turns = L * w / (2 * pi)
        s = min(max((turns - low) / (high - low), 0), 1)
        found.append((1 - s) * w / F + s * w)
    return found


def longrope(d: int, F: float, n: int, L: int, short: Row, long: Row) -> tuple[Row, float]:
    w = [w / divisor for w, divisor in zip(unscaled(d), short if n <= L else long)]
    return w, sqrt(1 + log(F) / log(L)) if F > 1 else 1.0


def proportional(d: int, F: float, part: float) -> Row:
    return [w / F if t < int(part * d // 2) else 0.0 for t, w in enumerate(unscaled(d))]
