"""Every kernel compiles for a GPU that is not there, and costs what it is known to cost."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fairseq_posenc.workbench.results.record import read
from tests.helpers.programs import SERVER, true_start

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import gpu  # noqa: E402
import launches  # noqa: E402
from gpu import done_before, run, run_all  # noqa: E402
from measuring.gpu_steps import LIMIT, NAMES, Step, estimate, first, steps  # noqa: E402

# Instructions of lanes for each pair of query and key, with dropout: some percent above what was
# counted with Triton 3.7, so that a change that makes kernels much dearer is seen.
LIMITS = {"plain": 50, "bias": 60, "gain": 64, "shaw": 72, "m4": 92, "deberta": 92, "m4m": 102}
WITH_PADDING = 7  # more, as a reset has it: its key is left out as padding is
FORMS = [*LIMITS, "shaw+values"]
RESETS = ["gain", "m4m", "shaw+values"]
# What each of two processes does, one after the other: their start is dear.
EACH = """
import json, sys, kernels
for forms in json.loads(sys.argv[1]):
    sys.argv[1:] = ["--dropout", "0.1", "--json", "--forms", *forms]
    kernels.main()
    print("---", flush=True)
"""
SHARED = {80: 166_912, 90: 232_448}  # bytes that a program can have

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="triton exists for Linux alone"),
]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Run ``benchmarks/kernels.py`` for every form with dropout, some with a reset."""
    pytest.importorskip("triton")
    # In processes of their own, for kernels are defined for the interpreter here.
    environment = {k: v for k, v in true_start().items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    wide = ["deberta", "shaw+values", "--width", "80"]
    parts = [[FORMS], [[*RESETS, "--reset", "1"], ["m4m", "--arch", "80"], wide]]
    started = [
        subprocess.Popen(
            [sys.executable, "-c", EACH, json.dumps(part)],
            **{"cwd": ROOT, "env": environment, "stdout": subprocess.PIPE},
        )
        for part in parts
    ]
    outputs = [text for each in started for text in each.communicate()[0].split(b"---")[:-1]]
    assert not any(process.returncode for process in started)
    *found, wide = [json.loads(output) for output in outputs]
    rows = {key: [row for each in found for row in each[key]] for key in ("sums", "kernels")}
    return {**rows, "wide": wide["kernels"]}


def test_every_form_compiles(compiled):
    forms = [(row["form"], row["reset"]) for row in compiled["sums"] if row["arch"] == 90]
    assert forms == [*((form, False) for form in FORMS), *((form, True) for form in RESETS)]
    assert {row["kernel"] for row in compiled["kernels"]} == {
        *("forward_kernel", "key_kernel", "rows_kernel", "table_kernel")
    }


def test_matrix_units_run_at_full_width(compiled):
    assert all(row["full_width"] for row in compiled["kernels"])


@pytest.mark.parametrize("form", LIMITS)
def test_a_pair_costs_little(compiled, form):
    rows = [x for x in compiled["sums"] if x["form"] == form and x["arch"] == 90]
    for row in rows:
        assert row["instructions"] <= LIMITS[form] + WITH_PADDING * row["reset"], row


def test_registers_suffice(compiled):
    for row in compiled["sums"]:
        assert row["spilled"] == 0, row


def test_shared_memory_suffices_for_wide_heads_too(compiled):
    for row in [*compiled["kernels"], *compiled["wide"]]:
        assert row["shared_bytes"] <= SHARED[row["arch"]], row


# Of alibi, adding the biases; of m4m, two products with their copies of the inputs, a table turned
# round, and scores that are not torch's.
ADDED = {"none": 0, "rope": 2, "alibi": 1, "m4m": 7}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_layer_starts_little_that_fairseqs_does_not():
    words = ["--families", "masked_lm", "--encodings", *ADDED]
    stock, *found = launches.count_rows(launches.parse_args(words))
    assert stock["layer"] > 20
    assert {row["encoding"]: sum(row["added"].values()) for row in found} == ADDED


def test_what_matters_most_on_a_gpu_takes_nine_minutes_at_most():
    found = steps(dry_run=False)
    tests = [step for step in found if step.kind in ("tests", "checker", "survival")]
    assert found[: len(tests)] == tests
    assert found[len(tests) :][: len(first())] == first()
    assert estimate([*tests, *first()]) <= LIMIT
    assert {step.kind for step in found} == {step.kind for step in steps(dry_run=True)}


def test_every_length_type_and_dropout_is_measured_of_every_encoding():
    found = set()
    for step in steps(dry_run=False):
        if step.kind in ("layers", "updates"):
            dtype, dropout, lengths, encodings = (
                words_after(step.words, option)
                for option in ("--dtype", "--dropout", "--length", "--encodings")
            )
            found |= set(itertools.product([step.kind], dtype, dropout, lengths, encodings))
    kinds, types = ["layers", "updates"], ["bfloat16", "float16"]
    lengths = ["128", "512", "2048", "8192"]
    # `none` is put into each step, by the benchmark itself.
    wanted = set(itertools.product(kinds, types, ["0.1", "0"], lengths, NAMES[1:]))
    assert wanted <= found


def words_after(words, option):
    """Return the words of an option, or of its plural."""
    at = words.index(option if option in words else f"{option}s") + 1
    return list(itertools.takewhile(lambda word: not word.startswith("--"), words[at:]))


def test_a_second_call_goes_on_where_the_first_was_cut(tmp_path):
    path = tmp_path / "results.json"
    step, late = (Step(name, "updates", 60, ["-c", ""]) for name in ("one", "two"))
    one = run(step, dry_run=False, left=60)
    cut = run(late, dry_run=False, left=0.2)
    path.write_text(json.dumps([one, cut]))
    before = done_before(path)
    assert before == {"one": one}
    again = list(run_all([step, late], before, dry_run=False))
    assert [x["end"] for x in again] == ["done", "done"]
    assert again[0] == one
    path.write_text(json.dumps([{**one, "code": "of another commit"}]))
    assert done_before(path) == {}


def test_what_needs_a_gpu_can_be_tried_without(monkeypatch):
    monkeypatch.delenv(SERVER)  # whose triton is not for the interpreter
    survival = next(step for step in steps(dry_run=True) if step.kind == "survival")
    result = run(survival, dry_run=True, left=LIMIT)
    assert result["end"] == "done", result
    assert [row["encoding"] for row in result["rows"]] == ["none", "shaw", "m4m"]
    assert all(row["finite"] for row in result["rows"])
    assert "\n| masked_lm | shaw | triton |" in "\n".join(gpu.format_tables([result]))


def test_results_go_to_the_page_beside_what_was_published(tmp_path):
    row = {"scope": "layer", "encoding": "deberta", "backend": "triton", "length": 8192}
    row |= {"dropout": 0.0, "dtype": "bfloat16", "seconds": 0.0777}
    results = [{"step": "layers", "end": "done", "seconds": 9.0, "rows": [row]}]
    (tmp_path / "results.json").write_text(json.dumps(results))
    page = tmp_path / "gpu.md"
    page.write_text(f"a\n{gpu.START}\nold\n{gpu.END}\nb\n")
    gpu.keep(tmp_path / "results.json", tmp_path / "kept.json", page)
    text = page.read_text()
    assert "| eager, as published |  | 119.3 |" in text
    assert "| `deberta`, triton | 0 | 77.7 |" in text
    assert text.startswith("a\n")
    assert text.endswith("b\n")
    assert "old" not in text
    assert read(tmp_path / "kept.json").figures["layers"] == [row]


def test_a_step_that_fails_is_told_and_stops_nothing():
    broken = steps(dry_run=True)[0]._replace(words=["-c", "raise SystemExit('no')"])
    assert run(broken, dry_run=True, left=LIMIT)["end"] == "failed with 1"


def test_a_step_that_would_be_too_late_is_cut_and_one_that_hangs_is_stopped():
    step = steps(dry_run=False)[0]._replace(seconds=1, words=["-c", "import time; time.sleep(600)"])
    assert run(step, dry_run=False, left=0.2)["end"] == "cut: 0 s were left"
    assert run(step, dry_run=False, left=60)["end"] == "stopped after 2 s"
