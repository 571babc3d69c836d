"""A cluster of two nodes on this machine: Debian's Slurm, with daemons and files of its own."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from fairseq_posenc.errors import RunError, UserError
from fairseq_posenc.workbench.running.jobs import Job, Step
from fairseq_posenc.workbench.running.options import Parser, add_cluster, parse_cluster
from tests.helpers.waiting import free_ports, wait_until

ROOT = Path(__file__).parents[2]
NODES = ("n1", "n2")
DAEMONS = ("munged", "slurmctld", "slurmd")
# Of accounting, as larger clusters have it.
DATABASE = ("slurmdbd", "mariadbd", "mariadb-install-db")
# A node that does not answer for 10 s is given up, and a job that is being ended is killed after 5.
# Accounting is off, as on many small clusters, unless a test wants it.
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
_ACCOUNTING = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=localhost
AccountingStoragePort={port}
AccountingStoragePass={folder}/munge.socket
"""
_SLURMDBD = """\
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
DbdHost=localhost
DbdPort={port}
SlurmUser=root
PidFile={folder}/slurmdbd.pid
LogFile={folder}/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={database}
StorageUser=slurm
StoragePass=slurm
"""


def why_not(daemons: Sequence[str] = DAEMONS, packages: str = "slurm-wlm munge") -> str:
    """Return why no cluster can be started here, or an empty string."""
    if missing := [name for name in daemons if not shutil.which(name, path=_path())]:
        return f"{', '.join(missing)} is not installed: apt install {packages}"
    return "" if os.getuid() == 0 else "Slurm's daemons are started as root"


def _path() -> str:
    return os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])


needs_slurm = pytest.mark.skipif(bool(why_not()), reason=why_not())
_no_database = why_not((*DAEMONS, *DATABASE), "slurm-wlm munge slurmdbd mariadb-server")
needs_accounting = pytest.mark.skipif(bool(_no_database), reason=_no_database)


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
        accounting: whether slurmdbd notes all jobs in a database.
    """

    def __init__(self, folder: Path, accounting: bool = False) -> None:
        self.folder = folder
        self._database: subprocess.Popen[bytes] | None = None
        port, first, second = free_ports(3)
        settings = {"host": socket.gethostname(), "port": port, "first": first, "second": second}
        self.conf = folder / "slurm.conf"
        self.conf.write_text(_CONF.format(folder=folder, **settings), encoding="utf-8")
        self._munged()
        if accounting:
            self._start_accounting()
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

    def kill(self, node: str) -> None:
        """Have a node die, with all that runs there; wait until Slurm has given it up."""
        ours = {f"SLURM_CONF={self.conf}".encode(), f"SLURMD_NODENAME={node}".encode()}
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended
                if ours <= {*(process / "environ").read_bytes().split(b"\0")}:
                    os.kill(int(process.name), signal.SIGKILL)
        wait_until(lambda: self._state(node).startswith("down"))

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

    def kill_controller(self) -> None:
        """Have it die."""
        os.kill(self._pid("slurmctld"), signal.SIGKILL)

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
        for name in (*NODES, "slurmctld", "slurmdbd", "munged"):
            with suppress(OSError, ValueError):  # a test has killed it
                os.kill(self._pid(name), signal.SIGKILL)
        if self._database:
            self._database.kill()
            self._database.wait()

    def _state(self, node: str) -> str:
        return self.ask("sinfo", "-hn", node, "-o", "%T").strip()

    def _pid(self, name: str) -> int:
        return int((self.folder / f"{name}.pid").read_text())

    def _daemon(self, *words: str, **variables: str) -> None:
        (self.folder / "state").mkdir(exist_ok=True)
        environment = {**self.environment, "PATH": _path(), **variables}
        subprocess.run(words, env=environment, check=True)

    def _start_accounting(self) -> None:
        """Start MariaDB and slurmdbd, and make the cluster known there."""
        port, database = free_ports(2)
        plain = ["--no-defaults", f"--datadir={self.folder}/database", "--user=root"]
        environment = {**self.environment, "PATH": _path()}
        install = ["mariadb-install-db", *plain, "--auth-root-authentication-method=normal"]
        subprocess.run(install, env=environment, check=True, capture_output=True)
        where = [f"--socket={self.folder}/sql", f"--port={database}", "--bind-address=127.0.0.1"]
        with open(self.folder / "mariadbd.log", "wb") as log:
            self._database = subprocess.Popen(
                ["mariadbd", *plain, *where], env=environment, stdout=log, stderr=log
            )
        user = (
            "create user slurm@localhost identified by 'slurm'; grant all on *.* to slurm@localhost"
        )
        sql = ["mariadb", "--no-defaults", f"--socket={self.folder}/sql", "-e", user]
        wait_until(lambda: subprocess.run(sql, capture_output=True).returncode == 0)
        path = self.folder / "slurmdbd.conf"
        path.touch(0o600)
        path.write_text(_SLURMDBD.format(folder=self.folder, port=port, database=database))
        with open(self.conf, "a", encoding="utf-8") as conf:
            conf.write(_ACCOUNTING.format(folder=self.folder, port=port))
        self._daemon("slurmdbd")
        wait_until(lambda: bool(self.ask("sacctmgr", "-i", "add", "cluster", "tests")))

    def _munged(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        names = {"key-file": key, "seed-file": self.folder / "munge.seed"}
        names |= {"socket": self.folder / "munge.socket", "pid-file": self.folder / "munged.pid"}
        names |= {"log-file": self.folder / "munged.log"}
        words = [f"--{name}={path}" for name, path in names.items()]
        subprocess.run(["munged", "--force", *words], env={"PATH": _path()}, check=True)


def count(folder: Path, steps: int, seconds: float) -> None:
    """Write numbers into a file, one after the other, from where it ends."""
    path = folder / "count"
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(counted(folder), steps):
        if (folder / "wrong").exists():
            raise UserError(f"{folder.name}: is wrong")
        time.sleep(seconds)
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{number}\n")


def counted(folder: Path) -> int:
    """Measure its progress."""
    path = folder / "count"
    return len(path.read_text().split()) if path.exists() else 0


def counting(out: Path, name: str, steps: int, seconds: float) -> Job:
    """Return a job that takes a time and needs nothing but the standard library."""
    folder = out / name

    work = lambda place: count(folder, steps, seconds)  # noqa: E731
    step = Step(folder, {}, work, steps, lambda: counted(folder), protected=True)
    return Job(name, folder, (step,))


def sweep(out: Path, steps: int, *options: str, items: int = 2, seconds: float = 0.2) -> list[str]:
    """Count in several items on the cluster; return a line for each that failed."""
    words = ["--on", "slurm", "time=5", *options]
    parser = Parser()
    add_cluster(parser)
    place = parse_cluster(parser.parse_args(words))
    assert place
    try:
        place.run([counting(out, f"p{n}", steps, seconds) for n in range(items)], out)
    except RunError as error:
        return re.split(r"; (?=p\d+: )", str(error).partition(" tries them again: ")[2])
    return []


if __name__ == "__main__":
    sys.exit(len(sweep(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])))
