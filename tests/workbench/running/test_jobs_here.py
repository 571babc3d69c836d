"""Jobs on this machine: a GPU each, one bar, locks, failures."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from fairseq_posenc.errors import RunError, UserError
from fairseq_posenc.workbench.running import local_machine
from fairseq_posenc.workbench.running.folders import is_locked, lock_folder
from fairseq_posenc.workbench.running.jobs import Job, RunContext, Step, Work
from fairseq_posenc.workbench.running.local_machine import LocalMachine
from fairseq_posenc.workbench.running.programs import run_logged
from tests.helpers.waiting import wait_until


def job(out: Path, name: str, work: Work, updates: int = 0) -> Job:
    """Build a job of a step."""
    return Job(name, out / name, (Step(out / name, {}, work, progress=lambda: 0),), updates)


@pytest.mark.parametrize(
    ("gpus", "at_a_time", "wanted"),
    [
        ([], 2, [{}, {}]),
        (["3", "GPU-5"], 2, [{"CUDA_VISIBLE_DEVICES": "3"}, {"CUDA_VISIBLE_DEVICES": "GPU-5"}]),
        (["3"], 2, [{"CUDA_VISIBLE_DEVICES": "3"}] * 2),
        (["0", "1"], 1, [{"CUDA_VISIBLE_DEVICES": "0"}]),
    ],
)
def test_jobs_that_run_at_a_time_share_the_gpus(tmp_path, monkeypatch, gpus, at_a_time, wanted):
    monkeypatch.setattr(local_machine, "visible_gpus", lambda: gpus)
    together, found = threading.Barrier(at_a_time), []

    def work(context: RunContext) -> None:
        found.append(context.environment)
        together.wait(10)

    jobs = [job(tmp_path, f"p{n}", work) for n in range(2 * at_a_time)]
    LocalMachine(at_a_time).run(jobs, tmp_path)
    key = str
    assert sorted(found, key=key) == sorted(2 * wanted, key=key)


@pytest.mark.parametrize("at_a_time", [1, 2])
def test_one_that_fails_ends_all_or_is_told_with_the_others(tmp_path, capsys, at_a_time):
    def fail(context: RunContext) -> None:
        raise UserError("is wrong: \nthe end of its log")

    jobs = [job(tmp_path, "p0", fail), job(tmp_path, "p1", lambda context: None)]
    with pytest.raises(UserError, match=r"^is wrong"):
        LocalMachine(at_a_time).run(jobs, tmp_path)
    machine = LocalMachine(at_a_time, keep_going=True)
    with pytest.raises(RunError, match=r"^1 of 2 runs failed; the same command .*: p0: is wrong$"):
        machine.run(jobs, tmp_path)
    assert jobs[1].is_done
    assert "of 2 runs ended] p0: is wrong: \nthe end of its log\n" in capsys.readouterr().err
    with pytest.raises(RunError, match=r"^1 of 2 runs failed"):
        machine.run(jobs, tmp_path)
    assert "p1: done before\n" in capsys.readouterr().err


def test_trainings_are_one_bar_of_updates(tmp_path, monkeypatch, capsys):
    shown: list[Any] = []

    class Bar:
        update = shown.append

        def __init__(self, label: str, total: int, unit: str) -> None:
            shown.append((label, total, unit))

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None:
            shown.append("closed")

    monkeypatch.setattr(local_machine, "bar", Bar)

    def train(context: RunContext) -> None:
        context.report(400, "")
        context.report(900, "accuracy 50.00")

    def fail(context: RunContext) -> None:
        context.report(400, "")
        raise UserError("is wrong")

    jobs = [job(tmp_path, "a", train, 1000), job(tmp_path, "b", fail, 1000)]
    with pytest.raises(RunError, match=r": b: is wrong$"):
        LocalMachine(keep_going=True).run(jobs, tmp_path)
    assert shown == [("all runs", 2000, " updates"), 400, 500, 100, 400, 600, "closed"]
    told = capsys.readouterr()
    assert told.out == ""
    assert "[0 of 2 runs ended] accuracy 50.00\n" in told.err
    assert "[2 of 2 runs ended] b: is wrong\n" in told.err
    LocalMachine().run(jobs[:1], tmp_path)
    assert shown[-3:] == [("all runs", 1000, " updates"), 1000, "closed"]
    assert capsys.readouterr().err == ""  # the bar has them


def test_each_folder_is_locked_unless_the_command_has_locked_all(tmp_path):
    locked = []
    jobs = [job(tmp_path, "a", lambda context: locked.append(is_locked(tmp_path / "a")))]
    with lock_folder(tmp_path / "a"), pytest.raises(UserError, match=r"^run .*/a: process \d+"):
        LocalMachine().run(jobs, tmp_path)
    LocalMachine().run(jobs, tmp_path)
    (tmp_path / "a" / "stamp.json").unlink()
    with lock_folder(tmp_path) as lock:
        LocalMachine(lock=lock).run(jobs, tmp_path)
    assert locked == [True, False]


@pytest.mark.parametrize("at_a_time", [1, 2])
def test_ctrl_c_ends_all_programs_and_tells_of_no_failure(tmp_path, capsys, at_a_time):
    ids: list[int] = []

    def work(context: RunContext) -> None:
        call = [Path(sys.executable).name, "-uc"]
        call += ["import os, time; print(os.getpid()); time.sleep(3600)"]
        number = len(ids)
        run_logged(
            call, tmp_path / f"{number}.log", context.lock, lambda line: ids.append(int(line))
        )

    def interrupt() -> None:
        wait_until(lambda: len(ids) == at_a_time)
        os.kill(os.getpid(), signal.SIGINT)

    jobs = [job(tmp_path, f"p{n}", work) for n in range(3)]
    killer = threading.Thread(target=interrupt)
    killer.start()
    with pytest.raises(KeyboardInterrupt):
        LocalMachine(at_a_time, keep_going=True).run(jobs, tmp_path)
    killer.join()
    assert len(ids) == at_a_time
    for each in ids:
        with pytest.raises(ProcessLookupError):
            os.kill(each, 0)
    assert capsys.readouterr().err == ""
