"""What ``make gpu`` runs, in which order, and what becomes of a step that is cut or fails."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import pytest

from fairseq_posenc.workbench.results.record import read
from tests.helpers.programs import SERVER

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import gpu  # noqa: E402
from gpu import read_finished, run, run_all  # noqa: E402
from measuring.gpu_steps import (  # noqa: E402
    ENCODINGS,
    TIME_LIMIT,
    TIMED_KINDS,
    Step,
    list_main_steps,
    list_steps,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="triton exists for Linux alone"),
]


def test_what_matters_most_on_a_gpu_takes_nine_minutes_at_most():
    found = list_steps(dry_run=False)
    tests = [step for step in found if step.kind in ("tests", "checker", "survival")]
    assert found[: len(tests)] == tests
    assert found[len(tests) :][: len(list_main_steps())] == list_main_steps()
    timed = [step.seconds for step in list_main_steps() if step.kind in TIMED_KINDS]
    together = max(step.seconds for step in tests)  # those without timing
    assert together + sum(timed) <= TIME_LIMIT
    assert {step.kind for step in found} == {step.kind for step in list_steps(dry_run=True)}


def test_every_length_type_and_dropout_is_measured_of_every_encoding():
    found = set()
    for step in list_steps(dry_run=False):
        if step.kind in ("layers", "updates"):
            dtype, dropout, lengths, encodings = (
                words_after(step.arguments, option)
                for option in ("--dtype", "--dropout", "--length", "--encodings")
            )
            found |= set(itertools.product([step.kind], dtype, dropout, lengths, encodings))
    kinds, types = ["layers", "updates"], ["bfloat16", "float16"]
    lengths = ["128", "512", "2048", "8192"]
    # `none` is put into each step, by the benchmark itself.
    wanted = set(itertools.product(kinds, types, ["0.1", "0"], lengths, ENCODINGS[1:]))
    assert wanted <= found


def words_after(words, option):
    """Return the words of an option, or of its plural."""
    at = words.index(option if option in words else f"{option}s") + 1
    return list(itertools.takewhile(lambda word: not word.startswith("--"), words[at:]))


def test_a_second_call_goes_on_where_the_first_was_cut(tmp_path):
    path = tmp_path / "results.json"
    step, late = (Step(name, "updates", 60, ["-c", ""]) for name in ("one", "two"))
    one = run(step, dry_run=False, seconds_left=60)
    cut = run(late, dry_run=False, seconds_left=0.2)
    path.write_text(json.dumps([one, cut]))
    before = read_finished(path)
    assert before == {"one": one}
    again = list(run_all([step, late], before, dry_run=False))
    assert [x["end"] for x in again] == ["done", "done"]
    assert again[0] == one
    path.write_text(json.dumps([{**one, "code": "of another commit"}]))
    assert read_finished(path) == {}


def test_what_needs_a_gpu_can_be_tried_without(monkeypatch):
    monkeypatch.delenv(SERVER)  # whose triton is not for the interpreter
    survival = next(step for step in list_steps(dry_run=True) if step.kind == "survival")
    result = run(survival, dry_run=True, seconds_left=TIME_LIMIT)
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
    broken = list_steps(dry_run=True)[0]._replace(arguments=["-c", "raise SystemExit('no')"])
    assert run(broken, dry_run=True, seconds_left=TIME_LIMIT)["end"] == "failed with 1"


def test_a_step_that_would_be_too_late_is_cut_and_one_that_hangs_is_stopped():
    step = list_steps(dry_run=False)[0]._replace(
        seconds=1, arguments=["-c", "import time; time.sleep(600)"]
    )
    assert run(step, dry_run=False, seconds_left=0.2)["end"] == "cut: 0 s were left"
    assert run(step, dry_run=False, seconds_left=60)["end"] == "stopped after 2 s"
