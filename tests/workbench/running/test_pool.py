"""A pool of workers, one GPU each; Ctrl-C ends all programs."""

import signal
import sys
import threading
import time
from functools import partial

import pytest

from fairseq_posenc.errors import RunError, UserError
from fairseq_posenc.workbench.running import programs
from fairseq_posenc.workbench.running.programs import run_here, run_logged

SLEEP = [sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(60)"]


@pytest.mark.parametrize(("jobs", "used"), [(2, {"0", "1"}), (1, {"0"}), (4, {"0", "1"})])
def test_workers_have_one_gpu_each(monkeypatch, jobs, used):
    monkeypatch.setattr(programs, "list_gpus", lambda: ["0", "1"])
    barrier = threading.Barrier(jobs)
    seen = []

    def task(environment):
        barrier.wait(10)  # all workers at once
        seen.append(environment["CUDA_VISIBLE_DEVICES"])

    run_here({str(number): task for number in range(4)}, jobs if jobs < 4 else 10**12)
    assert set(seen) == used
    assert seen.count("0") * len(used) == 4


def test_failures_are_listed_and_the_others_go_on_in_their_order(capsys):
    began = []

    def run(environment, name):
        began.append(name)
        if name == "a":
            raise UserError("wrong")

    with pytest.raises(RunError, match=r"1 of 3 runs failed; the same command .*: a: wrong"):
        run_here({name: partial(run, name=name) for name in "abc"}, 1)
    assert began == ["a", "b", "c"]
    assert "a: wrong" in capsys.readouterr().err


def test_ctrl_c_ends_all_programs_without_a_word(tmp_path, capsys):
    def watch():
        if (tmp_path / "log").exists() and "begun" in (tmp_path / "log").read_text():
            signal.raise_signal(signal.SIGINT)

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_here({"a": lambda _: run_logged(SLEEP, tmp_path / "log", None)}, 1, watch)
    assert time.monotonic() - start < 20
    assert capsys.readouterr().err == ""
