"""Tasks as jobs on a real Slurm: what its daemons do to a job is found nowhere else."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path

import pytest

from fairseq_posenc.errors import RunError, UserError
from fairseq_posenc.workbench.running import slurm
from fairseq_posenc.workbench.running.options import parse_slurm
from fairseq_posenc.workbench.running.programs import Environment
from fairseq_posenc.workbench.running.slurm import run_on_slurm
from tests.helpers.waiting import free_ports, wait_until

ROOT = Path(__file__).parents[3]
# One node; a job that is being ended is killed after 5 s. No accounting, as on small clusters.
CONF = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
KillWait=5
MpiDefault=none
SchedulerParameters=batch_sched_delay=1,sched_interval=2
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
PartitionName=main Nodes=n1 Default=YES
"""
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"


def ask(*words: str) -> str:
    """Run a command of Slurm's; return what it prints, "" if it fails."""
    done = subprocess.run(words, capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else ""


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have this process, and all that it starts, be of a cluster."""
    if os.getuid() != 0 or not all(shutil.which(x, path=PATH) for x in ("munged", "slurmctld")):
        pytest.skip("no cluster is started here: apt install slurm-wlm munge, as root")
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # short, as one of its files is a socket
    host, ports = socket.gethostname(), free_ports(2)
    conf, key = folder / "slurm.conf", folder / "munge.key"
    conf.write_text(CONF.format(folder=folder, host=host, ports=ports), encoding="utf-8")
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    for name in ("state", "spool"):
        (folder / name).mkdir()
    monkeypatch.setenv("SLURM_CONF", str(conf))
    monkeypatch.chdir(ROOT)
    files = {"key-file": key.name, "seed-file": "munge.seed", "socket": "munge.socket"}
    files |= {"pid-file": "munged.pid", "log-file": "munged.log"}
    munged = [f"--{option}={folder / name}" for option, name in files.items()]
    daemons = []
    for words in (["munged", "-F", "--force", *munged], ["slurmctld", "-D"], ["slurmd", "-D"]):
        more = {"SLURMD_NODENAME": "n1"} if words[0] == "slurmd" else {}  # its steps inherit it
        words += ["-N", "n1"] * bool(more)
        quiet = subprocess.DEVNULL
        environment = {**os.environ, "PATH": PATH, **more}
        daemons.append(subprocess.Popen(words, env=environment, stdout=quiet, stderr=quiet))
        ready = (folder / "munge.socket").exists if words[0] == "munged" else partial(ask, "sinfo")
        wait_until(ready, daemons[-1])
    idle = partial(ask, "sinfo", "-hN", "-o", "%T")
    wait_until(lambda: idle().strip() == "idle")
    yield
    ask("scancel", "--partition=main")
    wait_until(lambda: idle().strip() == "idle")
    for daemon in reversed(daemons):
        daemon.kill()
        daemon.wait()
    shutil.rmtree(folder)


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
@pytest.mark.usefixtures("cluster")
def test_jobs_are_requeued_and_failures_are_listed(tmp_path: Path) -> None:
    steps = {"short": 1, "wrong": 1, "requeued": 60}
    tasks = {name: partial(count, tmp_path / name, steps[name]) for name in steps}
    options = parse_slurm(["slurm", "--time=5", "cpus-per-task=1", "contiguous"])  # of sbatch
    assert options == {"time": "5", "cpus-per-task": "1", "contiguous": True}

    @cache
    def requeue() -> None:  # at the first look at the jobs
        long = tmp_path / "requeued"
        wait_until(lambda: long.exists() and long.read_text().count("number") > 5)
        (job,) = ask("squeue", "-h", "--array", "--states=R", "-o", "%i").split()
        ask("scontrol", "requeue", job)
        wait_until(lambda: "PENDING" in ask("squeue", "-h", "-j", job, "-o", "%T"))
        # Not after Slurm's two minutes, nor within the second in which a node forgets a job.
        ask("scontrol", "update", f"jobid={job}", "starttime=now+3")

    with pytest.raises(RunError, match=r"1 of 3 runs failed; .* wrong: the task is wrong") as error:
        run_on_slurm(tasks, tmp_path / "slurm", options, watch=requeue)
    assert "\n" not in str(error.value)
    assert (tmp_path / "short").read_text() == "begun\nnumber\n"
    lines = (tmp_path / "requeued").read_text()
    assert (lines.count("begun"), lines.count("number")) == (2, 60)
    assert not ask("squeue", "-h").strip()


@pytest.mark.parametrize("words", ["cloud", "local x=1", "slurm time", "slurm time=1 job-name=x"])
def test_wrong_places_are_one_line(words):
    with pytest.raises(UserError, match=rf"--on {words}: write local, or slurm .* time=12:00:00"):
        parse_slurm(words.split())


def test_without_slurm_it_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="squeue does not answer"):
        run_on_slurm({"a": print}, tmp_path, {"time": "1"})


def test_a_slurm_that_does_not_answer_is_not_waited_for(monkeypatch, tmp_path, capsys):
    (tmp_path / "squeue").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "scancel").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/canceled\n')
    for program in ("squeue", "scancel"):
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    slurm._cancel("jobs-of-mine")
    assert (tmp_path / "canceled").read_text() == "--name=jobs-of-mine\n"
    assert "see whether jobs jobs-of-mine are left" in capsys.readouterr().err
