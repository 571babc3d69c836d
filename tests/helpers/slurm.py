"""A cluster of two nodes on this machine: Debian's Slurm, with daemons and files of its own."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
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


@pytest.fixture(name="cluster")
def start_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Start a cluster, and have this process, and all that it starts, be of it."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    started = Cluster(folder)
    monkeypatch.setenv("SLURM_CONF", str(started.conf))
    monkeypatch.chdir(ROOT)
    yield started
    started.stop()
    shutil.rmtree(folder)


class Cluster:
    """Slurm's daemons, until :meth:`stop`; the path of their folder is short, for a socket."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        port, first, second = free_ports(3)
        settings = {"host": socket.gethostname(), "port": port, "first": first, "second": second}
        self.conf = folder / "slurm.conf"
        self.conf.write_text(_CONF.format(folder=folder, **settings), encoding="utf-8")
        (folder / "state").mkdir()
        self._munged()
        self._daemon("slurmctld")
        wait_until(lambda: bool(self.ask("sinfo", "-h")))
        for node in NODES:
            (folder / f"spool.{node}").mkdir()
            self._daemon("slurmd", "-N", node, SLURMD_NODENAME=node)  # which its steps inherit
        self._wait_for_nodes()

    def _wait_for_nodes(self) -> None:
        """Wait until each node takes a job."""
        wait_until(lambda: set(self.ask("sinfo", "-hN", "-o", "%T").split()) == {"idle"})

    def hasten(self, job: str) -> None:
        """Have a job that is requeued begin soon, and not after Slurm's two minutes.

        A node takes no job within the second in which it forgets that job.
        """
        wait_until(lambda: "PENDING" in self.ask("squeue", "-h", "-j", job, "-o", "%T"))
        self.ask("scontrol", "update", f"jobid={job}", "starttime=now+3")

    def ask(self, *words: str) -> str:
        """Run a command of Slurm's; return what it prints, "" if it fails."""
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True)
        return done.stdout if done.returncode == 0 else ""

    @property
    def environment(self) -> dict[str, str]:
        """That of a user of the cluster."""
        return {**os.environ, "SLURM_CONF": str(self.conf)}

    def stop(self) -> None:
        """End all jobs and daemons."""
        self.ask("scancel", "--partition=main")
        self._wait_for_nodes()
        for name in (*NODES, "slurmctld", "munged"):
            os.kill(int((self.folder / f"{name}.pid").read_text()), signal.SIGKILL)

    def _daemon(self, *words: str, **variables: str) -> None:
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
