"""Trainings side by side: order, the end of all with one, options."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.experiments import trainings
from fairseq_posenc.workbench.running import devices, programs
from fairseq_posenc.workbench.running.programs import run_logged, run_parallel
from tests.helpers.waiting import wait_until

PYTHON = Path(sys.executable).name


@pytest.mark.parametrize("jobs", [1, 2])
def test_no_more_than_the_jobs_run_at_a_time(jobs):
    lock, counts, all_of_them = threading.Lock(), [], threading.Barrier(jobs)
    running = 0

    def work() -> None:
        nonlocal running
        with lock:
            running += 1
            counts.append(running)
        all_of_them.wait()
        time.sleep(0.05)
        with lock:
            running -= 1

    run_parallel([work] * 4, jobs)
    assert max(counts) == jobs


def test_a_later_wave_begins_beside_an_earlier_one_on_free_cores_only(monkeypatch):
    monkeypatch.setattr(programs, "cores", lambda: 2)
    active: set[int] = set()
    beside, last_may_end = [], threading.Event()

    def work(number: int) -> None:
        active.add(number)
        if number == 2:  # the last of the first wave
            last_may_end.wait()
        elif number > 2 and not last_may_end.is_set():
            time.sleep(0.2)  # the others of its wave could begin meanwhile
            beside.append(set(active))
            last_may_end.set()
        active.remove(number)

    run_parallel([lambda n=n: work(n) for n in range(6)], 6, wave=3)
    ((last, later),) = map(sorted, beside)
    assert last == 2
    assert later > 2


@pytest.mark.parametrize("error", [UserError, KeyboardInterrupt])
def test_the_first_failure_ends_the_programs_of_the_others(error, tmp_path):
    """Also those that are about to start; what waits is never begun."""
    ids, begun = [], []

    def program(number: int) -> None:
        begun.append(number)
        call = [PYTHON, "-uc", "import os, time; print(os.getpid()); time.sleep(3600)"]
        run_logged(call, tmp_path / f"{number}", 0, lambda line: ids.append(int(line)))

    def failing() -> None:
        wait_until(lambda: ids)
        raise error("it went wrong")

    with pytest.raises(error, match="it went wrong"):
        run_parallel([lambda: program(1), failing, lambda: program(2), lambda: program(3)], 2)
    assert 3 not in begun
    for each in ids:
        with pytest.raises(ProcessLookupError):
            os.kill(each, 0)


def test_a_program_may_end_just_before_it_is_ended(monkeypatch):
    with subprocess.Popen(["true"], start_new_session=True, text=True) as program:
        program.wait()
        monkeypatch.setattr(program, "poll", lambda: None)
        programs._end_program(program)


def test_a_command_can_be_given_variables(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    lines = []
    call = [PYTHON, "-c", "import os; print(os.environ['OMP_NUM_THREADS'])"]
    run_logged(call, tmp_path / "log", 0, lines.append, {"OMP_NUM_THREADS": "1"})
    assert lines == ["1\n"]


@pytest.mark.parametrize(("device", "jobs"), [("cpu", 3), ("cuda", 1)])
def test_a_job_for_each_core_or_for_the_gpu(device, jobs, monkeypatch):
    monkeypatch.setattr(trainings, "choose_device", lambda: device)
    monkeypatch.setattr(trainings, "cores", lambda: 3)
    assert trainings.default_jobs() == jobs
    assert devices.cores() >= 1
