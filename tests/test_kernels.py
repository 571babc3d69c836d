"""Every kernel compiles for a GPU that is not there, and costs what it is known to cost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from programs import true_start

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from gpu import run, steps, tables  # noqa: E402

# Instructions of lanes for each pair of query and key, with dropout: some percent above what was
# counted with Triton 3.7, so that a change that makes kernels much dearer is seen.
LIMITS = {"plain": 50, "bias": 60, "gain": 64, "shaw": 72, "m4": 92, "deberta": 92, "m4m": 102}
FORMS = [*LIMITS, "shaw+values"]
RESETS = ["gain", "m4m", "shaw+values"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="triton exists for Linux alone"),
]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Return what ``benchmarks/kernels.py`` says of every form with dropout, some with a reset."""
    pytest.importorskip("triton")
    # In processes of their own, for kernels are defined for the interpreter here.
    environment = {k: v for k, v in true_start().items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "benchmarks/kernels.py", "--dropout", "0.1", "--json", "--forms"]
    parts = [FORMS[:5], FORMS[5:], [*RESETS, "--reset", "1"]]
    started = [
        subprocess.Popen([*command, *words], cwd=ROOT, env=environment, stdout=subprocess.PIPE)
        for words in parts
    ]
    outputs = [process.communicate()[0] for process in started]
    assert not any(process.returncode for process in started)
    found = [json.loads(output) for output in outputs]
    return {key: [row for each in found for row in each[key]] for key in ("sums", "kernels")}


def test_every_form_compiles(compiled):
    forms = [(row["form"], row["reset"]) for row in compiled["sums"]]
    assert forms == [*((form, False) for form in FORMS), *((form, True) for form in RESETS)]
    assert {row["kernel"] for row in compiled["kernels"]} == {
        *("forward_kernel", "key_kernel", "rows_kernel", "table_kernel")
    }


def test_matrix_units_run_at_full_width(compiled):
    assert all(row["full_width"] for row in compiled["kernels"])


@pytest.mark.parametrize("form", LIMITS)
def test_a_pair_costs_little(compiled, form):
    row = next(x for x in compiled["sums"] if x["form"] == form and not x["reset"])
    assert row["instructions"] <= LIMITS[form]
    assert row["spilled"] <= (60 if form == "m4m" else 0)


def test_everything_on_a_gpu_takes_nine_minutes_at_most():
    found = steps(dry_run=False)
    assert sum(step.seconds for step in found) <= 9 * 60
    assert {step.kind for step in found} == {step.kind for step in steps(dry_run=True)}


def test_what_needs_a_gpu_can_be_tried_without():
    survival = next(step for step in steps(dry_run=True) if step.kind == "survival")
    result = run(survival, dry_run=True)
    assert result["end"] == "done", result
    assert [row["encoding"] for row in result["rows"]] == ["none", "shaw", "m4m"]
    assert all(row["finite"] for row in result["rows"])
    assert "\n| shaw |" in "\n".join(tables([result]))


def test_a_step_that_fails_is_told_and_stops_nothing():
    broken = steps(dry_run=True)[0]._replace(words=["-c", "raise SystemExit('no')"])
    assert run(broken, dry_run=True)["end"] == "failed with 1"
