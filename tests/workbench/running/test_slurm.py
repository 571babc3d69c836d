"""Tasks as jobs on a real Slurm: results, failures in a line, jobs that are requeued."""

from __future__ import annotations

import threading
import time
from functools import partial
from pathlib import Path

import pytest

from fairseq_posenc.errors import RunError, UserError
from fairseq_posenc.workbench.running.options import parse_slurm
from fairseq_posenc.workbench.running.programs import Environment
from fairseq_posenc.workbench.running.slurm import run_on_slurm
from tests.helpers.slurm import Cluster, needs_slurm
from tests.helpers.waiting import wait_until


def count(path: Path, numbers: int, environment: Environment) -> None:
    """Write numbers into a file, one after the other, from where it ends."""
    if path.name == "wrong":
        raise UserError("the task is wrong")
    with open(path, "a", encoding="utf-8") as file:
        file.write("begun\n")
    for _ in range(path.read_text().count("number"), numbers):
        with open(path, "a", encoding="utf-8") as file:
            file.write("number\n")
        time.sleep(0.1)


@pytest.mark.slow
@needs_slurm
def test_jobs_are_requeued_and_failures_are_listed(cluster: Cluster, tmp_path: Path) -> None:
    """One job ends, one fails, and one is requeued and continues."""
    steps = {"short": 1, "wrong": 1, "requeued": 60}
    tasks = {name: partial(count, tmp_path / name, steps[name]) for name in steps}
    options = parse_slurm(["slurm", "time=5"])
    assert options is not None

    def requeue() -> None:
        long = tmp_path / "requeued"
        wait_until(lambda: long.exists() and long.read_text().count("number") > 5)
        (job,) = cluster.ask("squeue", "-h", "--array", "--states=R", "-o", "%i").split()
        cluster.ask("scontrol", "requeue", job)
        cluster.hasten(job)

    helper = threading.Thread(target=requeue)
    helper.start()
    with pytest.raises(RunError, match=r"1 of 3 runs failed; .* wrong: the task is wrong") as error:
        run_on_slurm(tasks, tmp_path / "slurm", options)
    helper.join()
    assert "\n" not in str(error.value)
    assert (tmp_path / "short").read_text() == "begun\nnumber\n"
    lines = (tmp_path / "requeued").read_text()
    assert (lines.count("begun"), lines.count("number")) == (2, 60)
    assert not cluster.ask("squeue", "-h").strip()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("cloud", "--on cloud: write local, or slurm with options of sbatch"),
        ("local x=1", "write local, or slurm"),
        ("slurm", "as in slurm partition=gpu time=12:00:00"),
        ("slurm time", "as in slurm partition=gpu time=12:00:00"),
    ],
)
def test_wrong_places_are_one_line(words, message):
    with pytest.raises(UserError, match=message):
        parse_slurm(words.split())


def test_options_are_those_of_sbatch():
    assert parse_slurm(["local"]) is None
    words = ["slurm", "--partition=gpu", "cpus-per-task=8", "time=1:00"]
    assert parse_slurm(words) == {"partition": "gpu", "cpus-per-task": "8", "time": "1:00"}


def test_without_slurm_it_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="squeue does not answer"):
        run_on_slurm({"a": print}, tmp_path, {"time": "1"})
