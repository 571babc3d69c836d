"""``benchmarks/complexity.py`` counts what attention does, and its record has the growth."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from complexity import (  # noqa: E402
    Size,
    TableSizes,
    WriteCounter,
    count_costs,
    evaluate_formulas,
    measure,
    measure_tables,
    parse_args,
)
from fairseq_posenc import specs  # noqa: E402
from fairseq_posenc.errors import UserError  # noqa: E402
from measuring import page, timing  # noqa: E402
from measuring.growth import TABLE1, complexity_table, growth  # noqa: E402

SMALL = Size(length=8, width=4, heads=2, backend="reference")
(KEPT,) = [result for result in page.load_results() if result.script == "complexity"]


def kept(encoding: str, backend: str, length: int = 2048, width: int = 64) -> dict:
    key = {"encoding": encoding, "backend": backend, "length": length, "width": width}
    (row,) = [row for row in KEPT.rows if key.items() <= row.items()]
    return row


@pytest.mark.parametrize(
    ("formulas", "value"),
    [
        ("none", 0),
        ("``n C`` for each sentence, once for all layers", 8 * 8),
        ("``h n^2`` for each sentence; ``n^2`` for all sentences together", 2 * 64 + 64),
        ("``2 h n u d + h n^2`` for each sentence", 2 * 2 * 8 * 15 * 4 + 2 * 64),
        ("``h n u + h n^2`` for each sentence; u is a number", 2 * 8 * 15 + 2 * 64),
        ("``4 n d^2 + 2 n^2 d`` for all", 4 * 8 * 16 + 2 * 64 * 4),
        ("``2 (2n-1) C^2``", 2 * 15 * 64),
    ],
)
def test_a_formula_has_its_value(formulas, value):
    assert evaluate_formulas(formulas, SMALL, tables=TableSizes(15, 0)) == value


@pytest.mark.parametrize(
    ("spec", "rows"),
    [
        ("shaw", 63),
        ("shaw(max_distance=4)", 9),
        ("m4m(max_distance=100)", 63),
        ("deberta_v2(buckets=8)", 15),
        ("transformer_xl", 63),
        ("t5", 0),
    ],
)
def test_the_rows_of_a_formula_are_distinct(spec, rows):
    (item,) = specs.parse(spec).items
    assert measure_tables(item, SMALL._replace(length=32)).rows == rows


@pytest.mark.parametrize(
    ("compute", "products", "written"),
    [
        (lambda a: a + a, 0, 12),
        (lambda a: a.view(2, 6).transpose(0, 1), 0, 0),
        (lambda a: torch.empty(5, 5), 0, 0),
        (lambda a: a @ a.T, 2 * 3 * 4 * 3, 0),
        (lambda a: (a @ a.T).softmax(-1), 2 * 3 * 4 * 3, 9),
        (lambda a: a.max(0), 0, 4 + 4),
    ],
    ids=["sum", "views", "empty", "product", "softmax", "two outputs"],
)
def test_every_operation_counts_once(compute, products, written):
    a = torch.randn(3, 4)
    with FlopCounterMode(display=False) as flops, WriteCounter(flops.flop_registry) as counted:
        compute(a)
    assert (flops.get_total_flops(), counted.numbers) == (products, written)


def test_costs_are_counted_of_a_second_pass():
    passes = []

    def run() -> None:
        passes.append(torch.zeros(10 if passes else 1000) + 1)

    assert count_costs(run)["operations"] == 2 * 10
    assert len(passes) >= 2


@pytest.mark.parametrize(
    ("small", "large", "found"),
    [((8, 10), (16, 40), 2.0), ((8, 10), (32, 40), 1.0), ((8, 10), (16, 10), 0.0)],
)
def test_growth_is_how_often_a_cost_doubles(small, large, found):
    rows = [dict(zip(("length", "numbers"), each)) for each in (small, large)]
    assert growth(*rows, "numbers", "length") == pytest.approx(found)


@pytest.mark.parametrize("costs", [(0, 5), (5, 0), (-1, 5)])
def test_what_costs_nothing_has_no_growth(costs):
    rows = [{"length": n, "numbers": cost} for n, cost in zip((8, 16), costs)]
    assert growth(*rows, "numbers", "length") is None


@pytest.mark.parametrize(
    ("encoding", "looked_up"),
    [
        *((name, 0) for name in TABLE1),
        ("deberta_v2", 0),
        ("shaw(max_distance=4)", 1),
        ("m4m(max_distance=4)", 2),
        ("deberta_v2(buckets=8)", 2),
    ],
)
def test_operations_are_those_of_the_formulas(encoding, looked_up, monkeypatch):
    monkeypatch.setattr(timing, "MIN_SECONDS", 1e-4)
    words = ["--encodings", encoding, "--backends", "reference", "--lengths", "64", "128"]
    rows = measure(parse_args([*words, "--widths", "16", "32", "--heads", "12", "--rounds", "1"]))
    assert [(row["length"], row["width"]) for row in rows] == [(64, 16), (128, 16), (128, 32)]
    for row in rows:
        assert row["ratio"] > 0
        # What is only gathered, cast or laid out anew counts too, but is no formula's. Numbers of
        # pairs that are looked up by row are many beside few products.
        expected = row["formula_operations"] + looked_up * 12 * row["length"] ** 2
        assert row["operations"] == pytest.approx(expected, rel=0.15) or (
            encoding == "learned" and row["operations"] == 2 * row["formula_operations"]
        )


def test_the_record_is_of_table_1():
    found = {(row["encoding"], row["backend"]) for row in KEPT.rows}
    assert found == {(name, backend) for name in TABLE1 for backend in ("reference", "blocked")}
    assert {row["length"] for row in KEPT.rows} == {128, 256, 512, 1024, 2048}


@pytest.mark.parametrize("encoding", [name for name in TABLE1 if name != "learned"])
def test_written_out_storage_grows_with_the_square_of_the_length_and_not_with_the_width(encoding):
    """The paper's tables have a factor of d/h more: products are shifted here, not vectors."""
    two, one = kept(encoding, "reference"), kept(encoding, "reference", 1024)
    assert growth(one, two, "numbers", "length") == pytest.approx(2, abs=0.05)
    narrow, wide = (kept(encoding, "reference", 512, width) for width in (64, 128))
    assert growth(narrow, wide, "numbers", "width") == pytest.approx(0, abs=0.05)


@pytest.mark.parametrize("encoding", ["shaw", "m4", "deberta", "m4m"])
def test_blocked_storage_of_tables_grows_with_the_length_at_most(encoding):
    two, one = kept(encoding, "blocked"), kept(encoding, "blocked", 1024)
    assert two["numbers"] <= 2.05 * one["numbers"]
    assert two["numbers"] < kept(encoding, "reference")["numbers"] / 10


def test_the_table_has_the_papers_storage_beside_ours():
    lines = complexity_table(KEPT.rows).splitlines()
    assert len(lines) == 2 + 2 * len(TABLE1)
    for name, row in TABLE1.items():
        own = [line for line in lines if line.startswith(f"| `{name}` |")]
        assert all(f"| `{row['texts']['complexity']}` |" in line for line in own)
        assert len(own) == 2


@pytest.mark.parametrize(
    "words",
    [["--lengths", "64"], ["--lengths", "64", "64"], ["--widths", "8"], ["--lengths", "0", "8"]],
)
def test_one_size_has_no_growth(words):
    with pytest.raises(UserError, match=f"{words[0]}: give at least two, of 1 or more"):
        parse_args(words)


@pytest.mark.slow
def test_the_command_is_as_the_page_has_it():
    tiny = ["--lengths", "8", "16", "--widths", "4", "8", "--heads", "2", "--rounds", "1"]
    program = [sys.executable, str(ROOT / "benchmarks" / "complexity.py"), *tiny]
    given = ["--encodings", "rope", "m4m", "--json"]
    done = subprocess.run([*program, *given], capture_output=True, text=True, check=True)
    rows = json.loads(done.stdout)
    assert {row["encoding"] for row in rows} == {"rope", "m4m"}  # rope: of no table 1
    assert "| `rope` | reference | - |" in complexity_table(rows)
    done = subprocess.run([*program, "--lengths", "8"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "error: --lengths: give at least two, of 1 or more, as growth needs\n"
