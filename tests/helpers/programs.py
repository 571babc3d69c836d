"""Programs that start fast: beside another ``python``, which has them run by a server that forks.

A start of a program costs 6 to 7 seconds of imports, and the slow tests have hundreds, most of them
made by other programs; a tiny training takes 0.3 s of processor time with the server. While
:func:`fast` holds, programs find each other as always: beside ``sys.executable`` or on the PATH.
"""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
BIN = Path(sys.executable).parent
SERVER = "FAIRSEQ_POSENC_TESTS_SERVER"
SHARED = "FAIRSEQ_POSENC_TESTS_SHARED"  # the server's folder, of the process that began the others


@cache
def _server() -> tuple[Any, Any]:
    """Start the server, once for each session; return its folder, deleted at the end, and it."""
    folder = tempfile.TemporaryDirectory(prefix="fairseq-posenc-programs-")
    python = Path(folder.name) / "python"
    call = shlex.join([sys.executable, "-IS", str(HERE / "fork_client.py")])
    python.write_text(f'#!/bin/sh\nexec {call} "$0" "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    for name in (*(x.name for x in BIN.glob("fairseq-*")), "hf", "sacrebleu", "torchrun", "worker"):
        python.with_name(name).symlink_to(python)
    with socket.socket(socket.AF_UNIX) as plain, socket.socket(socket.AF_UNIX) as plugin:
        for listener, name in ((plain, "socket"), (plugin, "socket.plugin")):
            listener.bind(str(python.with_name(name)))
            listener.listen()
        numbers = [plain.fileno(), plugin.fileno()]
        server = subprocess.Popen(
            [sys.executable, HERE / "fork_server.py", f"{folder.name}/code", *map(str, numbers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=numbers,
            start_new_session=True,  # Ctrl-C is for programs, whose clients pass it on
        )
    return folder, server


def share(workers: list[str]) -> None:
    """Start the server for workers of pytest-xdist, and have it start them, too."""
    if sys.platform == "linux" and SHARED not in os.environ:
        os.environ[SHARED] = folder = _server()[0].name
        if not os.path.exists("/dev/nvidiactl"):  # their tests use CUDA, which can break in forks
            workers[:] = [f"popen//python={shlex.quote(folder)}/worker"] * len(workers)


@contextmanager
def fast() -> Iterator[None]:
    """Let the programs that are started here be run by the server, which needs Linux."""
    if sys.platform != "linux":
        yield
        return
    folder = Path(os.environ.get(SHARED) or _server()[0].name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(folder / "python"))
        patch.setenv("PATH", str(folder), prepend=os.pathsep)
        patch.setenv(SERVER, str(folder / "socket"))
        yield


def true_start() -> dict[str, str]:
    """Return the environment in which programs are true new processes all the same."""
    return {name: value for name, value in os.environ.items() if name != SERVER}
