"""``make gpu``: a section that is missing, too long, or stops the others when it fails."""

import json
import sys
from dataclasses import asdict

import pytest

import gpu
from fairseq_posenc.workbench.results.record import read
from tests.helpers.programs import SERVER

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="no triton")]


def test_what_needs_a_gpu_for_seven_minutes_can_be_tried_without(tmp_path, monkeypatch):
    assert sum(gpu.SECTIONS.values()) <= 420
    if gpu.torch.cuda.is_available():
        monkeypatch.delenv(SERVER, raising=False)  # whose triton is not for the interpreter
    for name in ("TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")  # so that they are as before in the end
    monkeypatch.setattr(gpu, "TESTS", [*gpu.TESTS[:-1], "--noconftest", "-m"])  # without fairseq
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--out", str(tmp_path), "--dry-run"])
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    assert not ended.value.code
    results = json.loads((tmp_path / "results.json").read_text())
    assert [x["section"] for x in results] == [measure.__name__ for measure in gpu.SECTIONS]
    rows = {x["section"]: x["rows"] for x in results}
    assert [x["encoding"] for x in rows["measure_kernels"]] == gpu.ENCODINGS
    assert {x["encoding"] for x in rows["measure_layers"]} == {"none", "alibi", "t5", "m4m"}
    assert "| `m4m` | 8 |" in (tmp_path / "tables.md").read_text()


def test_results_go_to_the_page_beside_what_was_published(tmp_path):
    row = {"scope": "layer", "encoding": "deberta", "backend": "triton", "length": 8192}
    row |= {"dropout": 0.0, "dtype": "bfloat16", "seconds": 0.0777, "ratio": 1.0}
    result = gpu.Result("measure_layers", "done", 9.0, [{**row, "memory_ratio": 1.0}])
    (tmp_path / "results.json").write_text(json.dumps([asdict(result)]))
    page = tmp_path / "gpu.md"
    page.write_text(gpu.START + gpu.END)
    gpu.keep(tmp_path / "results.json", tmp_path / "kept.json", page)
    assert "| eager, as published |  | 119.3 |" in page.read_text()
    assert "| `deberta`, triton | 0 | 77.7 |" in page.read_text()
    assert read(tmp_path / "kept.json").figures["measure_layers"] == result.rows


def test_a_section_that_fails_keeps_its_rows_and_stops_nothing():
    def fail(bench):
        yield {"a": 1, "b": float("nan")}
        raise RuntimeError("out of memory\nand more")

    result = gpu.run_section(fail, 1, gpu.Bench(dry_run=True))
    assert result.end == "failed: RuntimeError: out of memory"
    assert result.rows == [{"a": 1, "b": None}]  # as JSON has it
