"""Pieces of work on a real cluster of two nodes, and what befalls machines, jobs and commands."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.running import executor
from fairseq_posenc.workbench.running.executor import Slurm, _Queue, _SlurmJob, refuse_jobs
from fairseq_posenc.workbench.running.options import parse_cluster
from tests.helpers import programs
from tests.helpers.slurm import (
    ROOT,
    Cluster,
    count,
    counted,
    counting,
    needs_accounting,
    needs_slurm,
    sweep,
)
from tests.helpers.waiting import wait_until


def jobs(out: Path) -> dict[str, str]:
    return json.loads((out / "slurm" / "jobs.json").read_text())


def submissions(out: Path) -> int:
    return len(list((out / "slurm").glob("*_submission.sh")))


def numbers(out: Path, piece: str = "p0") -> list[int]:
    return [int(line) for line in (out / piece / "count").read_text().split()]


def command(cluster: Cluster, out: Path, *words: str) -> subprocess.Popen[str]:
    """Start a command that waits for its jobs."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.helpers.slurm", out, *words],
        cwd=ROOT,
        env=cluster.environment,
        stderr=subprocess.PIPE,
        text=True,
    )


def end_of(waiting: subprocess.Popen[str], status: int = 0) -> str:
    """Run a command, which ends within a bounded time; return its output."""
    try:
        told = waiting.communicate(timeout=300)[1]
    except subprocess.TimeoutExpired:
        waiting.kill()
        told = waiting.communicate()[1]
    assert waiting.returncode == status, told
    return told


@pytest.fixture(autouse=True)
def start_true_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have jobs be processes of their own, with the environment by which a node's are found."""
    monkeypatch.delenv(programs.SERVER, raising=False)


@needs_slurm
@pytest.mark.slow
class TestOnTwoNodes:
    def test_all_pieces_are_done_once(self, cluster, tmp_path, capsys):
        assert sweep(tmp_path, 5, items=3) == []
        assert [numbers(tmp_path, f"p{n}") for n in range(3)] == [list(range(5))] * 3
        told = capsys.readouterr().err
        assert "p1  " in told
        assert "[3 of 3 ended]" in told
        assert sweep(tmp_path, 5, items=3) == []
        assert submissions(tmp_path) == 1

    def test_detached_jobs_are_found_again(self, cluster, tmp_path, capsys):
        with pytest.raises(SystemExit) as ended:
            sweep(tmp_path, 20, "--detach")
        assert ended.value.code == 0
        assert "the same command without --detach waits; scancel --name" in capsys.readouterr().err
        with pytest.raises(UserError, match="has jobs of --on slurm; wait for them"):
            refuse_jobs(tmp_path)
        before = jobs(tmp_path)
        assert sweep(tmp_path, 20) == []
        assert (jobs(tmp_path), submissions(tmp_path)) == (before, 1)
        assert numbers(tmp_path) == list(range(20))
        refuse_jobs(tmp_path)

    def test_more_pieces_are_submitted_beside_those_that_run(self, cluster, tmp_path):
        with pytest.raises(SystemExit):
            sweep(tmp_path, 20, "--detach", items=1)
        assert sweep(tmp_path, 20, items=2) == []
        assert submissions(tmp_path) == 2
        assert numbers(tmp_path, "p0") == numbers(tmp_path, "p1") == list(range(20))

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
    def test_a_command_that_is_stopped_leaves_its_jobs(self, cluster, tmp_path, number):
        with command(cluster, tmp_path, "30") as waiting:
            wait_until(lambda: counted(tmp_path / "p0") > 0)
            waiting.send_signal(number)
            told = end_of(waiting, -number)
        if number == signal.SIGINT:
            assert "the jobs go on; the same command waits for them again; scancel" in told
        assert sweep(tmp_path, 30) == []
        assert submissions(tmp_path) == 1
        assert numbers(tmp_path) == list(range(30))

    def test_what_a_killed_command_submitted_without_a_note_is_cancelled(self, cluster, tmp_path):
        with pytest.raises(SystemExit):
            sweep(tmp_path, 30, "--detach")
        (tmp_path / "slurm" / "jobs.json").unlink()
        assert sweep(tmp_path, 30) == []
        assert submissions(tmp_path) == 2
        assert numbers(tmp_path) == list(range(30))

    def test_a_job_that_fails_is_told_and_the_others_go_on(self, cluster, tmp_path, capsys):
        (tmp_path / "p0").mkdir()
        (tmp_path / "p0" / "wrong").touch()
        (failure,) = sweep(tmp_path, 5)
        assert failure.startswith("p0: FAILED (NonZeroExitCode): p0: is wrong (its log: ")
        assert numbers(tmp_path, "p1") == list(range(5))
        assert "p0: FAILED (NonZeroExitCode): p0: is wrong" in capsys.readouterr().err
        assert submissions(tmp_path) == 1
        (tmp_path / "p0" / "wrong").unlink()
        assert sweep(tmp_path, 5) == []
        assert submissions(tmp_path) == 2

    def test_a_cancelled_job_is_no_result(self, cluster, tmp_path):
        with command(cluster, tmp_path, "500") as waiting:
            wait_until(lambda: counted(tmp_path / "p0") > 0)
            cluster.ask("scancel", *jobs(tmp_path).values())
            told = end_of(waiting, 2)
        assert "p0: CANCELLED " in told

    def test_wrong_options_are_slurms_to_tell(self, cluster, tmp_path):
        with pytest.raises(UserError, match=r"--on slurm time=5 partition=no: .*invalid partition"):
            sweep(tmp_path, 1, "partition=no")

    def test_a_missing_submitit_is_told(self, cluster, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "submitit", None)
        with pytest.raises(UserError, match="--on slurm needs the package submitit: pip install"):
            sweep(tmp_path, 1)

    def test_a_second_command_is_told_of_the_first(self, cluster, tmp_path):
        with command(cluster, tmp_path, "30") as waiting:
            wait_until(lambda: counted(tmp_path / "p0") > 0)
            with pytest.raises(UserError, match=r"slurm: .* is running there"):
                sweep(tmp_path, 30)
            end_of(waiting)


@needs_slurm
@pytest.mark.slow
class TestFaults:
    def test_a_requeued_job_goes_on(self, cluster, tmp_path):
        with command(cluster, tmp_path, "60") as waiting:
            wait_until(lambda: counted(tmp_path / "p0") > 3)
            cluster.ask("scontrol", "requeue", jobs(tmp_path)["p0"])
            cluster.hasten(jobs(tmp_path)["p0"])
            end_of(waiting)
        assert numbers(tmp_path) == list(range(60))
        assert submissions(tmp_path) == 1

    def test_a_node_that_dies_loses_nothing(self, cluster, tmp_path):
        with command(cluster, tmp_path, "100") as waiting:
            wait_until(lambda: min(counted(tmp_path / "p0"), counted(tmp_path / "p1")) > 3)
            job = cluster.ask("squeue", "-h", "-r", "-w", "n1", "-o", "%i").strip()
            cluster.kill("n1")
            cluster.start("n1")
            cluster.hasten(job)
            end_of(waiting)
        assert [numbers(tmp_path, f"p{n}") for n in (0, 1)] == [list(range(100))] * 2
        assert submissions(tmp_path) == 1

    def test_a_job_whose_time_is_up_goes_on_in_the_next(self, cluster, tmp_path):
        """Slurm tells it between 10 and 50 s before the end of its minute."""
        with command(cluster, tmp_path, "300", "time=1", "signal=USR2@10") as waiting:
            wait_until(lambda: "BeginTime" in cluster.ask("squeue", "-h", "-o", "%r"))
            for job in jobs(tmp_path).values():
                cluster.hasten(job)
                cluster.ask("scontrol", "update", f"jobid={job}", "timelimit=10")
            end_of(waiting)
        assert [numbers(tmp_path, f"p{n}") for n in (0, 1)] == [list(range(300))] * 2

    def test_a_controller_that_does_not_answer_is_waited_for(self, cluster, tmp_path):
        with command(cluster, tmp_path, "40") as waiting:
            wait_until(lambda: counted(tmp_path / "p0") > 3)
            cluster.kill_controller()
            wait_until(lambda: counted(tmp_path / "p0") == 40)
            cluster.start_controller()
            end_of(waiting)
        assert submissions(tmp_path) == 1


@pytest.fixture(name="accounted")
def start_accounted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Start a cluster whose jobs are noted in a database, and be of it."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    started = Cluster(folder, accounting=True)
    monkeypatch.setenv("SLURM_CONF", str(started.conf))
    monkeypatch.chdir(ROOT)
    yield started
    started.clear()
    started.stop()
    shutil.rmtree(folder)


@needs_accounting
@pytest.mark.slow
def test_accounting_changes_nothing(accounted, tmp_path):
    """A sweep with a job that fails and one that is requeued, as accounting has it, too."""
    (tmp_path / "p0").mkdir()
    (tmp_path / "p0" / "wrong").touch()
    with command(accounted, tmp_path, "30") as waiting:
        wait_until(lambda: counted(tmp_path / "p1") > 3)
        accounted.ask("scontrol", "requeue", jobs(tmp_path)["p1"])
        accounted.hasten(jobs(tmp_path)["p1"])
        told = end_of(waiting, 1)
    assert "p0: FAILED (NonZeroExitCode): p0: is wrong" in told
    assert numbers(tmp_path, "p1") == list(range(30))
    (tmp_path / "p0" / "wrong").unlink()
    assert sweep(tmp_path, 30) == []
    assert numbers(tmp_path) == list(range(30))
    assert submissions(tmp_path) == 2

    def noted() -> list[str]:
        found = accounted.ask("sacct", "-nX", "--duplicates", "-o", "state").split()
        return sorted(found)

    states = ["COMPLETED", "COMPLETED", "FAILED", "REQUEUED"]
    wait_until(lambda: noted() == states)


def test_options_of_sbatch_are_read():
    words = ["slurm", "partition=gpu", "--cpus-per-task=4", "gpus_per_node=1", "time=1-0"]
    found = parse_cluster(Namespace(on=words, jobs=3, detach=True, one_by_one=True))
    options = {"partition": "gpu", "cpus-per-task": "4", "gpus-per-node": "1", "time": "1-0"}
    assert found == Slurm(options, 3, True)
    assert parse_cluster(Namespace(on=["local"], jobs=3, detach=False, one_by_one=False)) is None


@pytest.mark.parametrize(
    ("words", "detach", "message"),
    [
        ("cloud", False, "--on cloud: is neither local nor slurm"),
        ("local", True, "--on local: leave --detach out"),
        ("local time=5", False, "--on local: leave time=5 out"),
        ("slurm gpu", False, "--on slurm gpu: write it as key=value, as in partition=gpu"),
        ("slurm time=5 array=3", False, "--on slurm array=3: array is set here; leave it out"),
        ("slurm partition=gpu", False, "--on slurm: say how long a job may take, as in time=12:"),
    ],
)
def test_what_cannot_be_read_is_told(words, detach, message):
    with pytest.raises(UserError, match=message):
        parse_cluster(Namespace(on=words.split(), jobs=None, detach=detach, one_by_one=False))


def test_jobs_are_for_the_cluster_where_this_machine_does_one_piece_after_the_other():
    with pytest.raises(UserError, match="--on local: leave --jobs out"):
        parse_cluster(Namespace(on=["local"], jobs=3, detach=False, one_by_one=True))


@pytest.mark.parametrize("minutes", [2, 600])
def test_only_a_job_whose_time_is_up_may_come_no_further(tmp_path, monkeypatch, minutes):
    """It may be preempted as often as the cluster likes."""
    end = (datetime.now() + timedelta(minutes=minutes)).isoformat(timespec="seconds")
    (tmp_path / "squeue").write_text(f'#!/bin/sh\n[ "$3" = --jobs=7 ] && echo {end}\n')
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    job = _SlurmJob(counting(tmp_path, "p0", 5, 0), tmp_path / "lock", 90)
    job.checkpoint()
    if minutes == 2:
        with pytest.raises(UserError, match="made no progress in all its time; give it more"):
            job.checkpoint()
        count(tmp_path / "p0", 3, 0)
    job.checkpoint()


def test_a_machine_without_slurm_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="--on slurm: squeue does not answer; is this a machine"):
        sweep(tmp_path, 1)
    refuse_jobs(tmp_path)


def test_submitted_jobs_have_not_ended_because_slurm_does_not_answer(tmp_path, monkeypatch, capsys):
    queue = _Queue(tmp_path)
    left = iter([{}])
    monkeypatch.setattr(queue, "_ask_slurm", lambda: next(left, None))
    monkeypatch.setattr(executor, "_submit", lambda *_: ["7_0"])
    queue.folder.mkdir()
    queue.submit([counting(tmp_path, "p0", 1, 0)], Slurm({}, None, False))
    assert "p0  7_0       UNKNOWN" in capsys.readouterr().err
