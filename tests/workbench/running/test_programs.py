"""Programs that the fork server runs: words, streams, ends and signals as those of processes.

What goes wrong here would show elsewhere as a fault of the package.
"""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.helpers.commands import run, script
from tests.helpers.programs import BIN
from tests.helpers.waiting import is_running, wait_until

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("", 0, ""),
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('no')", 1, "no\n"),
        ("raise KeyError('x')", 1, "KeyError: 'x'\n"),
        ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt\n"),
        ("import os; os.kill(os.getpid(), 15)", -signal.SIGTERM, ""),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
        ("import atexit, sys; atexit.register(print, 'end', file=sys.stderr)", 0, "end\n"),
    ],
)
def test_a_program_ends_as_a_process_of_its_own_does(code, status, said):
    done = run("python", "-c", code, fails=True, warnings="default")
    assert done.status == status
    assert done.err.endswith(said)
    assert bool(done.err) == bool(said)


ENDLESS = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print(os.getpid(), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_signals_reach_the_program(number):
    command = [sys.executable, "-c", ENDLESS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        program = int(process.stdout.readline())
        process.send_signal(number)
        assert process.wait() == (7 if number == signal.SIGTERM else -number)
        wait_until(lambda: not is_running(program))


def test_a_program_finds_others_that_start_fast():
    assert script("fairseq-train").parent != BIN
    module = "fairseq_posenc.workbench.running.programs"
    code = f"from {module} import find_command as f; print(f('fairseq-train'))"
    assert run("python", "-c", code, warnings="default").out == f"{script('fairseq-train')}\n"
    done = subprocess.run(["sh", "-c", "command -v fairseq-train"], capture_output=True, text=True)
    assert done.stdout == f"{script('fairseq-train')}\n"
