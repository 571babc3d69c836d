"""Commands under faults of any kind: signals, ends at a write or in it, disks that are full."""

from __future__ import annotations

import hashlib
import os
import random
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.helpers import fault_jobs as disturbed
from tests.helpers import programs
from tests.helpers.commands import HOOK, script
from tests.helpers.waiting import wait_until

SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT}
# What the faults at a write are called here, and in `fault_hook/sitecustomize.py`.
AT_WRITES = {"kill at a write": "kill", "kill in a write": "torn", "no room at a write": "full"}
DISKS = ["full disk", "read-only disk"]
KINDS = [*SIGNALS, *AT_WRITES, "two at once", *DISKS]
MARK = "TRUST_ROUND"  # of the processes of a round
PATIENCE = 600  # seconds
LOCKS = (".fairseq-train", ".fairseq-posenc")
TIMES = rb"[\d.,]+ (h|min|s)\b"


class Fault(NamedTuple):
    """What happens to a command.

    Attributes:
        kind: of `KINDS`.
        moment: seconds from the start, for what comes from outside.
        number: of the write, for what comes at one.
        size: bytes that still fit.
    """

    kind: str
    moment: float = 0.0
    number: int = 0
    size: int = 0


class Said(NamedTuple):
    """How a command ended, and what it said."""

    status: int
    text: str


class Started(NamedTuple):
    """A command that runs, and what gathers its output in a file."""

    process: subprocess.Popen[bytes]
    sink: subprocess.Popen[bytes]
    file: Any

    def end(self) -> Said:
        """Wait for the end."""
        self.process.wait(PATIENCE)
        with suppress(subprocess.TimeoutExpired):  # an orphan may hold it open
            self.sink.wait(60)
        text = os.pread(self.file.fileno(), 1 << 24, 0).decode(errors="replace")
        return Said(self.process.returncode, text)


class Bench:
    """A command in a folder of its own, and what it makes if nobody disturbs it.

    Args:
        job: the command, of those of ``disturbed.py``.
        true: whether it is a true new process when it is disturbed, whose orphans can be found.
    """

    def __init__(self, job: str, true: bool = True) -> None:
        self._true = true
        self._folder = tempfile.TemporaryDirectory(prefix="fairseq-posenc-trust-")
        self.base = Path(self._folder.name)
        self.out = self.base / "out"
        self.ledger = self.base / "ledger"
        self.job = job
        self.clear()
        self.words = [str(word) for word in disturbed.JOBS[job](self.out)]
        began = time.monotonic()
        first = self.run("count,0,0")
        self.seconds = time.monotonic() - began
        assert first.status == 0, first.text[-4000:]
        self.writes = self.written()
        self.size = sum(path.stat().st_size for path in self.out.rglob("*") if path.is_file())
        made = contents(self.out)
        self.clear()
        assert self.run().status == 0
        again = contents(self.out)
        assert made.keys() == again.keys()
        self.varying = sorted(name for name in made if made[name] != again[name])  # times
        self.expected = again

    def __str__(self) -> str:
        made = f"{self.seconds:.1f} s, {self.writes} writes, {len(self.expected)} files"
        return f"{self.job}: {made}; not compared, as two runs differ: {self.varying}"

    def clear(self) -> None:
        """Begin with an empty folder."""
        subprocess.run(["rm", "-rf", self.out], check=True)
        self.out.mkdir()
        self.ledger.unlink(missing_ok=True)

    def is_held(self) -> bool:
        """Return whether a run holds its folder: a lock's file is there a moment before."""
        locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
        held = {words[5].rpartition(":")[2] for words in locks if words[1] != "->"}
        found = [path for path in self.out.rglob(".*") if path.name in LOCKS]
        return any(str(path.stat().st_ino) in held for path in found)

    def written(self) -> int:
        """Return the writes that were counted."""
        return self.ledger.stat().st_size // 100 if self.ledger.exists() else 0

    @contextmanager
    def started(self, fault: str = "", mark: str = "") -> Iterator[Started]:
        """Start the command, with a mark that the children of a true new process inherit."""
        true = self._true and (fault or mark)
        environment = programs.true_start() if true else dict(os.environ)
        environment.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore")
        environment[MARK] = mark
        if fault:
            paths = [str(HOOK), *filter(None, [os.environ.get("PYTHONPATH")])]
            environment["PYTHONPATH"] = os.pathsep.join(paths)
            environment["TRUST_FAULT"] = f"{fault},{self.out},{self.ledger}"
        with tempfile.TemporaryFile() as said:
            # What limits the size of files does not limit a pipe.
            sink = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=said)
            process = subprocess.Popen(
                [str(script(self.words[0])), *self.words[1:]],
                cwd=self.base,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=sink.stdin,
                stderr=subprocess.STDOUT,
            )
            assert sink.stdin is not None
            sink.stdin.close()
            try:
                yield Started(process, sink, said)
            finally:
                process.kill()
                process.wait()
                sink.kill()
                sink.wait()

    def run(self, fault: str = "", mark: str = "") -> Said:
        """Run the command to its end."""
        with self.started(fault, mark) as started:
            return started.end()


def contents(folder: Path) -> dict[str, str]:
    """Return a digest of each file.

    It is of a checkpoint's weights and optimizer's state, and of all in a report but times.
    """
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name not in LOCKS and path.suffix != ".log":
            digest = hashlib.sha256()
            if path.suffix == ".pt":
                state = torch.load(path, map_location="cpu")
                digest_of(state.get("model"), digest)
                digest_of(state.get("last_optimizer_state"), digest)
            else:
                data = path.read_bytes()
                digest.update(re.sub(TIMES, b"", data) if path.suffix == ".md" else data)
            found[str(path.relative_to(folder))] = digest.hexdigest()
    return found


def digest_of(value: Any, digest: Any) -> None:
    """Add all tensors and numbers of a state, in order."""
    if isinstance(value, dict):
        for key in value:
            digest.update(str(key).encode())
            digest_of(value[key], digest)
    elif isinstance(value, (list, tuple)):
        for each in value:
            digest_of(each, digest)
    elif isinstance(value, torch.Tensor):
        digest.update(value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    else:
        digest.update(repr(value).encode())


@contextmanager
def disk(folder: Path, size: int) -> Iterator[None]:
    """Lay a file system of its own over a folder for a round; what is in it is lost after."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
    subprocess.run(mount, check=True, capture_output=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def remount(folder: Path, option: str) -> None:
    """Change an option of a folder's file system.

    A process that is ending has its files open for a moment after it can no longer be found.
    """
    command = ["mount", "-o", f"remount,{option}", str(folder)]
    wait_until(lambda: subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0)


def draw(bench: Bench, kind: str, rng: random.Random) -> Fault:
    """Return a fault of a kind, at a place of chance."""
    moment = rng.uniform(0.1, 1.0) * bench.seconds
    number = rng.randint(1, max(1, bench.writes))
    size = int(10 ** rng.uniform(0, 6.3))
    if kind == "full disk":
        size = int(bench.size * rng.uniform(0.1, 0.9))
    return Fault(kind, round(moment, 2), number, size)


def disturb(bench: Bench, fault: Fault, mark: str) -> tuple[bool, Said]:
    """Run the command under a fault; return whether it was met, and what the command said."""
    if fault.kind in AT_WRITES:
        said = bench.run(f"{AT_WRITES[fault.kind]},{fault.number},{fault.size}", mark)
        return bench.written() >= fault.number, said
    if fault.kind == "full disk":
        said = bench.run(mark=mark)
        return said.status != 0, said
    sent = SIGNALS.get(fault.kind, signal.SIGKILL)
    with bench.started(mark=mark) as started:
        process = started.process
        if fault.kind == "two at once":
            while process.poll() is None and not bench.is_held():
                time.sleep(0.01)
            process.send_signal(signal.SIGSTOP)  # or it might come to its end meanwhile
            met = process.poll() is None
            second = bench.run()
            process.send_signal(signal.SIGCONT)
            first = started.end()
            return met, second if met else first
        with suppress(subprocess.TimeoutExpired):
            process.wait(fault.moment)
        met = process.poll() is None
        process.send_signal(sent)
        return met, started.end()


def raw_contents(folder: Path) -> dict[str, bytes]:
    """Return all files as they are."""
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
