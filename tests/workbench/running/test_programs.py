"""Programs run by the fork server are what true processes are to those that start them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import pytest

from tests.helpers.commands import USER_DIR, script
from tests.helpers.programs import BIN, true_start
from tests.helpers.waiting import is_running, wait_until

pytestmark = pytest.mark.slow
both = pytest.mark.parametrize("true", [False, True], ids=["forked", "true"])


def python(*words: str, true: bool = False, **how) -> subprocess.CompletedProcess[str]:
    environment = {**(true_start() if true else os.environ), **how.pop("env", {})}
    command = [sys.executable, *words]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, **how
    )


def test_torch_and_fairseq_are_there_but_nothing_of_ours():
    found = python("-c", "import sys; print(*sys.modules)").stdout.split()
    assert {"torch", "fairseq"} <= set(found)
    assert not [name for name in found if name.startswith(("fairseq_cli", "fairseq_posenc"))]
    assert "torch" not in python("-c", "import sys; print(*sys.modules)", true=True).stdout


def test_the_plugin_is_loaded_for_programs_that_name_it():
    code = "from fairseq.models import ARCH_MODEL_REGISTRY as known; print('roberta_rope' in known)"
    assert python("-c", code, str(USER_DIR)).stdout == "True\n"
    assert python("-c", code, "fairseq_posenc").stdout == "False\n"


def test_fairseqs_commands_say_the_same(tmp_path):
    """Their log is set up before they import fairseq, whose import sets up another one."""
    words = ["nowhere", "--user-dir", str(USER_DIR), "--arch", "roberta_none_tiny", "--cpu"]
    told = []
    for environment in (true_start(), os.environ):
        done = subprocess.run(
            [script("fairseq-train"), *words], capture_output=True, text=True, env=environment
        )
        lines = [re.sub(r"^[-0-9]+ [0-9:]+ ", "", line) for line in done.stdout.splitlines()]
        *logged, error = done.stderr.splitlines()
        logged = [line for line in logged if line.startswith(("DEBUG", "INFO"))]
        told.append((done.returncode, lines, [*logged, error]))
    status, (imported, *said), errors = told[0]
    assert "tensorboardX" in imported
    assert "batch-size" in errors[-1]
    assert told[1] == (status, said, errors)


TELL = """
import os, random, sys, warnings
warnings.warn("careful")
print(sys.argv, sys.path[0], __name__, os.getcwd(), os.environ["TOLD"], sys.stdin.read())
print("\N{SNOWMAN}", sys.stdout.isatty(), file=sys.stderr)
"""


@both
def test_words_directory_environment_and_streams(tmp_path, true):
    how = {"cwd": tmp_path, "env": {"TOLD": "é"}, "input": "given", "true": true}
    done = python("-c", TELL, "a b", "", **how)
    assert done.stdout == f"['-c', 'a b', '']  __main__ {tmp_path} é given\n"
    assert done.stderr.splitlines()[-1] == "\N{SNOWMAN} False"
    assert "UserWarning: careful" in done.stderr
    (tmp_path / "tell.py").write_text(TELL, encoding="utf-8")
    how["env"]["PYTHONWARNINGS"] = "ignore"
    done = python("tell.py", **how)
    assert done.stdout == f"['tell.py'] {tmp_path} __main__ {tmp_path} é given\n"
    assert "careful" not in done.stderr
    done = python("-m", "tell", "x", **how)
    assert done.stdout == f"['{tmp_path}/tell.py', 'x'] {tmp_path} __main__ {tmp_path} é given\n"


@both
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
def test_ends(code, status, said, true):
    done = python("-c", code, true=true)
    assert done.returncode == status
    assert done.stderr.endswith(said)
    assert bool(done.stderr) == bool(said)


@both
def test_open_files_are_handed_on(tmp_path, true):
    with open(tmp_path / "file", "w") as file:
        code = f"import os; os.write({file.fileno()}, b'written')"
        assert python("-c", code, true=true, pass_fds=[file.fileno()]).returncode == 0
        assert python("-c", code, true=true).returncode == 1
    assert (tmp_path / "file").read_text() == "written"


@both
@pytest.mark.parametrize("end", ["", "raise KeyError", "sys.exit(3)", "sys.exit('no')"])
def test_files_are_written_to_their_ends(end, true, tmp_path):
    code = f"import sys\ndef f():\n file = open('file', 'w'); file.write('all'); {end}\nf()"
    assert bool(python("-c", code, true=true, cwd=tmp_path).returncode) == bool(end)
    assert (tmp_path / "file").read_text() == "all"


ENDLESS = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print(os.getpid(), flush=True)
time.sleep(600)
"""


@both
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_signals_reach_the_program(number, true):
    environment = true_start() if true else dict(os.environ)
    with subprocess.Popen(
        [sys.executable, "-c", ENDLESS], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        program = int(process.stdout.readline())
        process.send_signal(number)
        assert process.wait() == (7 if number == signal.SIGTERM else -number)
        wait_until(lambda: not is_running(program))


def test_a_program_finds_others_that_start_fast():
    assert script("fairseq-train").parent != BIN
    module = "fairseq_posenc.workbench.running.programs"
    code = f"from {module} import find_command as f; print(f('fairseq-train'))"
    assert python("-c", code).stdout == f"{script('fairseq-train')}\n"
    assert python("-c", code, true=True).stdout == f"{BIN}/fairseq-train\n"
    done = subprocess.run(["sh", "-c", "command -v fairseq-train"], capture_output=True, text=True)
    assert done.stdout == f"{script('fairseq-train')}\n"
