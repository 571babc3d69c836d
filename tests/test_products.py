"""What tests share: the choice of a product, which has each value, and what is made once."""

from __future__ import annotations

import pytest

from tests.helpers.commands import made_once, new_directory
from tests.helpers.products import product_of, some_of
from tests.helpers.programs import SHARED

AXES = [
    (["a", "b", "c"], range(17)),
    (range(17), ["a", "b", "c"], [True, False]),
    (["a", "b"], [1, 2]),
    (["a"], [1]),
]


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("times", [1, 2, 3])
def test_each_value_of_each_axis_is_chosen(axes, times):
    chosen = product_of(*axes, times=times, whole=False)
    assert [set(column) for column in zip(*chosen)] == [set(axis) for axis in axes]
    assert len(set(chosen)) == len(chosen) <= times * max(map(len, axes))
    assert chosen == product_of(*axes, times=times, whole=False)
    assert set(chosen) <= set(product_of(*axes, whole=True))


def test_the_whole_is_the_product():
    assert product_of("ab", [1, 2], whole=True) == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]
    assert product_of([("a", 1), ("b", 2)], [3], whole=True) == [("a", 1, 3), ("b", 2, 3)]
    assert [some_of("ac", "abc", whole=whole) for whole in (False, True)] == [[*"ac"], [*"abc"]]


def test_values_of_short_axes_are_not_bound_to_each_other():
    chosen = product_of(range(40), [True, False], [True, False], whole=False)
    assert {case[1:] for case in chosen} == {(a, b) for a in (True, False) for b in (True, False)}


def test_what_all_workers_need_is_made_by_the_first(tmp_path, monkeypatch):
    monkeypatch.setenv(SHARED, str(tmp_path))
    calls = []

    def make(name):
        calls.append(name)
        return new_directory()

    workers = [made_once(make), made_once(make)]
    first, second = (worker("a") for worker in workers)
    assert first == second
    assert first.is_relative_to(tmp_path)
    assert workers[0]("b") != first
    assert calls == ["a", "b"]
    assert not new_directory().is_relative_to(tmp_path)
