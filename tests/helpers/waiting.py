"""Conditions that are waited for, however slow the machine is, and ports of one's own."""

from __future__ import annotations

import fcntl
import itertools
import random
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

# Below those that systems give to connections; in an order of each process's own.
_PORTS = itertools.cycle(random.SystemRandom().sample(range(10_000, 32_000), 22_000))


def wait_until(holds: Callable[[], object], program: subprocess.Popen | None = None) -> None:
    """Wait until something holds; fail if the program ends before, or after eight minutes."""
    end = (began := time.monotonic()) + 480
    while not holds():
        if program and program.poll() is not None:
            said = program.stdout.read() if program.stdout else ""
            raise AssertionError(f"it ended with {program.returncode}: {said}")
        if (now := time.monotonic()) > end:
            raise TimeoutError("not within eight minutes")
        time.sleep(max(0.01, 4 * (now - began)))  # one that asks a program does not keep it busy
        began = time.monotonic()


def is_running(process: int) -> bool:
    """Return whether a process of this number runs; one that waits to be reaped does not."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] not in "ZX"


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock on a file."""
    with open(path, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def free_ports(count: int) -> list[int]:
    """Return ports that are free, and that nobody gets by chance before they are used."""
    found: list[int] = []
    while len(found) < count:
        port = next(_PORTS)
        with socket.socket() as trial:
            if trial.connect_ex(("127.0.0.1", port)) != 0:
                found.append(port)
    return found
