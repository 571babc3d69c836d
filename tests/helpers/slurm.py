"""A cluster of two nodes on this machine: Debian's Slurm, with daemons and files of its own."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.helpers.waiting import free_ports, wait_until

ROOT = Path(__file__).parents[2]
NODES = ("n1", "n2")
DAEMONS = ("munged", "slurmctld", "slurmd")
# A node that does not answer for 10 s is given up, and a job that is being ended is killed after 5.
# Accounting is off, as on many small clusters.
_CONF = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdTimeout=10
KillWait=5
ReturnToService=2
MpiDefault=none
SchedulerParameters=batch_sched_delay=1,sched_interval=2
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=1
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=1
PartitionName=main Nodes=n1,n2 Default=YES
"""


def why_not() -> str:
    """Return why no cluster can be started here, or an empty string."""
    if missing := [name for name in DAEMONS if not shutil.which(name, path=_path())]:
        return f"{', '.join(missing)} is not installed: apt install slurm-wlm munge"
    return "" if os.getuid() == 0 else "Slurm's daemons are started as root"


def _path() -> str:
    return os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])


needs_slurm = pytest.mark.skipif(bool(why_not()), reason=why_not())


@pytest.fixture(scope="module", name="cluster_of_module")
def start_cluster() -> Iterator[Cluster]:
    """Start a cluster for the tests of a module."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    started = Cluster(folder)
    yield started
    started.stop()
    shutil.rmtree(folder)


@pytest.fixture(name="cluster")
def join_cluster(cluster_of_module: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Have this process, and all that it starts, be of the module's cluster."""
    monkeypatch.setenv("SLURM_CONF", str(cluster_of_module.conf))
    monkeypatch.chdir(ROOT)
    yield cluster_of_module
    cluster_of_module.clear()


class Cluster:
    """Slurm's daemons, until :meth:`stop`.

    Args:
        folder: new, for their files; its path is short, as one is a socket.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        port, first, second = free_ports(3)
        settings = {"host": socket.gethostname(), "port": port, "first": first, "second": second}
        self.conf = folder / "slurm.conf"
        self.conf.write_text(_CONF.format(folder=folder, **settings), encoding="utf-8")
        self._munged()
        self.start_controller()
        for node in NODES:
            self.start(node)

    def start(self, node: str) -> None:
        """Bring a node up.

        The controller of Slurm 22.05 dies of a job that it gives to a node while that comes back,
        and a node that is back before it was missed keeps its lost job for as long as that may run.
        """
        (self.folder / f"spool.{node}").mkdir(exist_ok=True)
        self._daemon("slurmd", "-N", node, SLURMD_NODENAME=node)  # which its steps inherit
        wait_until(lambda: self._state(node) == "idle")

    def clear(self) -> None:
        """End all jobs, and wait until each node takes another."""
        self.ask("scancel", "--partition=main")
        wait_until(lambda: {self._state(node) for node in NODES} == {"idle"})

    def hasten(self, job: str) -> None:
        """Have a job that is requeued begin soon, and not after Slurm's two minutes.

        A node takes no job within the second in which it was told to forget that job.
        """
        wait_until(lambda: "PENDING" in self.ask("squeue", "-h", "-j", job, "-o", "%T"))
        self.ask("scontrol", "update", f"jobid={job}", "starttime=now+3")

    def start_controller(self) -> None:
        """Start the daemon that knows the jobs, with what it knew before."""
        self._daemon("slurmctld")
        wait_until(lambda: bool(self.ask("sinfo", "-h")))

    def ask(self, *words: str) -> str:
        """Run a command of Slurm's; return what it prints, "" if it fails."""
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True)
        return done.stdout if done.returncode == 0 else ""

    @property
    def environment(self) -> dict[str, str]:
        """That of a user of the cluster."""
        return {**os.environ, "SLURM_CONF": str(self.conf)}

    def stop(self) -> None:
        """End all daemons."""
        for name in (*NODES, "slurmctld", "munged"):
            with suppress(OSError, ValueError):  # a test has killed it
                os.kill(self._pid(name), signal.SIGKILL)

    def _state(self, node: str) -> str:
        return self.ask("sinfo", "-hn", node, "-o", "%T").strip()

    def _pid(self, name: str) -> int:
        return int((self.folder / f"{name}.pid").read_text())

    def _daemon(self, *words: str, **variables: str) -> None:
        (self.folder / "state").mkdir(exist_ok=True)
        environment = {**self.environment, "PATH": _path(), **variables}
        subprocess.run(words, env=environment, check=True)

    def _munged(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        names = {"key-file": key, "seed-file": self.folder / "munge.seed"}
        names |= {"socket": self.folder / "munge.socket", "pid-file": self.folder / "munged.pid"}
        names |= {"log-file": self.folder / "munged.log"}
        words = [f"--{name}={path}" for name, path in names.items()]
        subprocess.run(["munged", "--force", *words], env={"PATH": _path()}, check=True)
