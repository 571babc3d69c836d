"""Tables whose rows serve runs of distances, against the same rows written out by a loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from fairseq_posenc.backends import BACKENDS, blocked, flex
from fairseq_posenc.backends.base import AttentionCall
from fairseq_posenc.backends.blocked import geometry
from fairseq_posenc.encodings.runs import Runs
from fairseq_posenc.encodings.term import ByDistance
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.mask import Mask
from tests.helpers.products import product_of
from tests.helpers.terms import (
    ROWS,
    TABLES,
    Inputs,
    assert_equals_reference,
    draft_call,
    terms_of,
    with_tensors,
)
from tests.helpers.uncompiled_flex import attend_uncompiled

B, H, T, D = 2, 2, 70, 3
CPU = torch.device("cpu")
STARTS: dict[str, Sequence[int]] = {
    "clipped": range(-4, 6),
    "clipped close": range(0, 2),
    "clipped within the last block": range(-60, 61),
    "buckets": (-34, -21, -13, -8, -5, -3, -2, -1, 0, 1, 2, 3, 4, 6, 9, 14, 22, 35),
    "buckets of the past": (-29, -7, -3, -1, 0),
    "two rows": (1,),
    "one row": (),
    "a run in the middle": (-50, -2, 3),
    "all beyond the span": range(-300, -200),
    "rows that no distance has": (-50, -3, -3, 2, 2, 2, 9),
    "as many rows as distances": (*range(2 - T, T - 1), T - 2),  # a row of two, and one of none
}
FORMS: dict[str, dict[str, Any]] = {
    "query table": {"query_table": 1},
    "key table": {"key_table": H, "scale_factor": 3.0},
    "two tables": {"query_table": H, "key_table": H},
    "product": {"query_table": 1, "key_table": 1, "product": True},
    "product per head": {"query_table": H, "key_table": H, "bias": 1, "product": True},
    "product of two": {"query_table": 1, "product": True},
    "product of all": {"query_table": H, "key_table": 1, "gain": 1, "bias": H, "product": True},
    "values": {"value_table": 1, "query_table": H},
    "values per head": {"value_table": H},
    "numbers": {"gain": H, "bias": 1},
    "states": {"state_table": 1, "query_table": H},
    "states beside a product": {"state_table": H, "query_table": 1, "product": True},
    "channels": {"channel_gain": 1},
}


@pytest.fixture(autouse=True)
def _several_blocks(monkeypatch):
    """Make blocks so small that a call has several, with runs longer than a block."""
    monkeypatch.setattr(geometry, "MAX_QUERIES", 16)
    monkeypatch.setattr(geometry, "FEW_QUERIES", 8)
    monkeypatch.setattr(geometry, "PAIRS_PER_THREAD", 16 * 80)
    monkeypatch.setattr(flex, "_compile_attention", lambda: attend_uncompiled)


def first_tokens() -> torch.Tensor:
    first = torch.zeros(B, T, dtype=torch.bool)
    first[0, 0] = first[1, 3] = True
    return first


def make_terms(form: str, starts: Sequence[int], tgt_len: int, reset: bool) -> tuple[Terms, Terms]:
    """Return terms of distinct rows, and those with each row repeated by a loop."""
    shared: dict[str, Any] = {}
    if "state_table" in FORMS[form]:  # which has no rows of a reset
        reset = False
        shared["states"] = torch.randn(B, H, tgt_len, D, dtype=torch.float64, requires_grad=True)
    whole = {**shared}
    distances = range(1 - T, tgt_len)
    runs = Runs(starts, 1 - T, tgt_len - 1)
    first = first_tokens() if reset else None
    for name, value in FORMS[form].items():
        if name not in TABLES:
            shared[name] = whole[name] = value
            continue
        size = (D,) if name in ROWS else ()
        table = torch.randn(value, len(starts) + 1 + 2 * reset, *size, dtype=torch.float64)
        shared[name] = table.requires_grad_()
        rows = [table[:, sum(start <= r for start in starts)] for r in distances]
        whole[name] = torch.stack([*rows, *(table[:, n] for n in (-2, -1) if reset)], 1)
    return terms_of(runs, reset=first, **shared), terms_of(reset=first, **whole)


def inputs(tgt_len: int = T) -> Inputs:
    query, key, value = (torch.randn(B, H, n, D, dtype=torch.float64) for n in (tgt_len, T, T))
    return query.requires_grad_(), key.requires_grad_(), value.requires_grad_()


@pytest.mark.parametrize(
    ("starts", "form", "reset", "tgt_len", "direction", "saved"),
    product_of(STARTS, FORMS, [False, True], [T, 33, 1], ["both", "lr", "rl"], [0, 10**9]),
)
@pytest.mark.parametrize("name", ["reference", "blocked"])
def test_equals_repeated_rows(name, starts, form, reset, tgt_len, direction, saved, monkeypatch):
    monkeypatch.setattr(blocked, "SAVED_BYTES", saved)
    terms, whole = make_terms(form, STARTS[starts], tgt_len, reset)
    if not BACKENDS[name].refuses(draft_call(terms, tgt_len=tgt_len)):
        assert_equals_reference(name, terms, Mask(direction), inputs(tgt_len), 1e-13, whole)
    else:
        assert form == "channels" or (form.startswith("values") and reset)


@pytest.mark.parametrize(
    ("starts", "form", "window", "left"),
    product_of(
        STARTS,
        ["two tables", "product per head", "product of all", "values"],
        [3, 40, None],
        [False, True],
    ),
)
@pytest.mark.parametrize("name", ["reference", "blocked"])
def test_limits_of_the_keys(name, starts, form, window, left):
    padding = torch.zeros(B, T, dtype=torch.bool)
    padding[1, slice(3) if left else slice(-5, None)] = True
    segments = (torch.arange(T) // 30)[None].expand(B, -1)
    for direction in ("both", "lr"):
        mask = Mask(direction, padding, window=window, segments=segments)
        terms, whole = make_terms(form, STARTS[starts], T, left and form != "values")
        assert_equals_reference(name, terms, mask, inputs(), 1e-13, whole)


@pytest.mark.parametrize(
    ("starts", "form"),
    product_of(
        ["clipped", "buckets", "two rows", "one row"],
        ["two tables", "product", "product of all", "values"],
    ),
)
def test_gradients_at_the_ends_of_runs_are_finite_differences(starts, form, monkeypatch):
    """At both ends of each run a pair moves from one row to the next, here in several blocks."""
    monkeypatch.setattr(geometry, "FEW_QUERIES", 4)
    length = 7
    runs = Runs(STARTS[starts], 1 - length, length - 1)
    terms, _ = make_terms(form, STARTS[starts], T, reset=False)
    qkv = [torch.randn(1, H, length, D, dtype=torch.float64, requires_grad=True) for _ in range(3)]

    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        query, key, value, *tables = tensors
        given = Terms(
            replace(x, runs=runs) if isinstance(x, ByDistance) else x
            for x in with_tensors(terms, tables)
        )
        return BACKENDS["blocked"].attend(AttentionCall(query, key, value, given, Mask("lr")))[0]

    assert torch.autograd.gradcheck(attend, (*qkv, *terms.tensors().values()), atol=1e-6)


@pytest.mark.parametrize(
    ("starts", "form", "reset", "direction"),
    product_of(STARTS, ["two tables", "product of all"], [False, True], ["both", "lr"]),
)
def test_flex(starts, form, reset, direction):
    qkv = [torch.randn(B, H, T, D) for _ in range(3)]
    for tgt_len in (T, 1):
        terms, whole = (
            x.map(lambda x: x.detach().float() if x.requires_grad else x.detach())
            for x in make_terms(form, STARTS[starts], tgt_len, reset)
        )
        call = AttentionCall(qkv[0][:, :, -tgt_len:], *qkv[1:], terms, Mask(direction))
        theirs, _ = BACKENDS["reference"].attend(call._replace(terms=whole))
        torch.testing.assert_close(flex.attend(call)[0], theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("starts", STARTS)
def test_the_row_of_each_distance(starts):
    runs = Runs(STARTS[starts], -T, T)
    distances = torch.arange(-3 * T, 3 * T)
    expected = [sum(start <= r for start in STARTS[starts]) for r in distances.tolist()]
    assert runs.find(distances).tolist() == expected


@pytest.mark.parametrize("span", [(-T, T), (-3, 2), (-40, 0), (0, 0), (5, 9), (-400, -390)])
@pytest.mark.parametrize("starts", STARTS)
def test_a_span_takes_the_rows_that_it_needs(starts, span):
    kept, runs = Runs(STARTS[starts], *span).trim()
    rows = torch.arange(len(STARTS[starts]) + 1)[None, kept]
    expected = [sum(s <= r for s in STARTS[starts]) for r in range(span[0], span[1] + 1)]
    assert rows[0].tolist() == list(range(expected[0], expected[-1] + 1))
    assert (rows if runs is None else runs.expand(rows))[0].tolist() == expected
    assert (runs is None) == (len(set(expected)) == len(expected))


def test_equal_tables_stay_one_tensor_and_a_reset_stays_at_the_end():
    runs = Runs(range(-1, 2), -5, 4)
    table = torch.randn(1, 6, D)
    terms = terms_of(runs, query_table=table, key_table=table, reset=first_tokens()).expanded()
    query_rows, key_rows = terms.rows("query"), terms.rows("key")
    assert query_rows.table is key_rows.table
    assert query_rows.runs is key_rows.runs is None
    assert torch.equal(query_rows.table[:, -2:], table[:, -2:])
    assert query_rows.table.size(1) == 12


def test_biases_of_different_runs_are_added_up():
    ours = terms_of(Runs(range(-1, 2), -9, 9), bias=torch.randn(1, 4))
    theirs = terms_of(Runs((0,), -9, 9), bias=torch.randn(H, 2))
    whole = terms_of(bias=torch.randn(1, 19))
    expected = sum(x.bias.expand() for x in (ours, theirs, whole))
    torch.testing.assert_close((ours | theirs | whole).bias.expand(), expected)
