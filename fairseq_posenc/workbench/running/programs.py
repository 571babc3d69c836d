"""Runs fairseq's commands and keeps their logs; runs several tasks at a time, and ends them all.

A task does nothing if its result exists (:mod:`fairseq_posenc.folders` has an example), so the same
command continues where it stopped::

    run_here({task: partial(fine_tune, task) for task in tasks}, jobs=len(list_gpus()) or 1)
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue

from fairseq_posenc.errors import RunError, UserError, how_to_install
from fairseq_posenc.workbench.running.devices import list_gpus
from fairseq_posenc.workbench.running.progress import say

Environment = Mapping[str, str]  # variables for a task's programs: which GPU is theirs
Task = Callable[[Environment], object]

_QUOTED_LINES = 15  # of the end of a log, in a message
# By default an OpenMP thread that waits for another one spins. With other work on the same cores
# that makes training several times slower; sleeping costs a few percent on an idle machine. The
# user's own values of both variables win.
_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "PYTHONUNBUFFERED": "1"}
# What precedes a message that explains a failure, so that the end of the log is not shown.
_USER_ERROR = re.compile(
    "^(?:fairseq-[a-z-]+: error: |"  # of wrong options, or of a UserError or RunError
    r"fairseq_posenc\.errors\.(?:User|Run)Error: |"  # the same in a traceback, as of a rank
    # hydra's own line. After it may come a traceback, or a line with the first prefix.
    r"Error executing job with overrides: .*\n(?!Traceback|fairseq-))(\S.*)",
    re.MULTILINE,
)
_SECONDS_TO_END = 10.0  # between asking a program to end and killing it
_POLL_SECONDS = 1.0  # between checks of the tasks
_running: set[subprocess.Popen[str]] = set()  # programs of all threads of this process


def find_command(name: str) -> str:
    """Find a console script, first beside the running Python; an absolute path is returned as is.

    Raises:
        UserError: it is not installed.
    """
    folders = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    if (path := shutil.which(name, path=folders)) is None:
        place = f"neither beside {sys.executable} nor on the PATH"
        raise UserError(f"{name} is {place}: {how_to_install('fairseq')}")
    return path


def find_error_line(output: str) -> str | None:
    """Find the last line in a command's output that is one of our errors; None without one."""
    return next(reversed(_USER_ERROR.findall(output)), None)  # the group: without the prefix


def run_logged(
    command: Sequence[str],
    log: Path,
    lock: int | None,
    on_line: Callable[[str], None] | None = None,
    environment: Environment | None = None,
) -> None:
    """Run a command, which on Linux dies with this process; append it and its output to a log file.

    Without ``on_line``, the program itself writes to the file, so no line is lost at a kill.

    Args:
        command: name of a console script, or absolute path of a program, and arguments.
        log: the file.
        lock: descriptor of a folder's lock, which the command keeps if it outlives us, or None.
        on_line: called with each line of output.
        environment: variables that override the user's.

    Raises:
        RunError: the command failed; the message ends with the last lines of the log.
    """
    # From util-linux: only Linux can kill a program when the thread that started it ends.
    die_with_parent = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
    with open(log, "a", encoding="utf-8", buffering=1) as output:  # a line at a time
        output.write(f"$ {shlex.join(command)}\n")
        process = subprocess.Popen(
            [*die_with_parent, find_command(command[0]), *command[1:]],
            stdin=subprocess.DEVNULL,
            stdout=output if on_line is None else subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            env={**_ENVIRONMENT, **os.environ, **(environment or {})},
            # In a new process group: Ctrl-C reaches only our process, which then ends the group.
            start_new_session=True,
            pass_fds=[] if lock is None else [lock],
        )
        _running.add(process)
        try:
            for line in process.stdout or ():
                output.write(line)
                if on_line is not None:
                    on_line(line)
            status = process.wait()
        finally:
            _end_program(process)
            _running.discard(process)
    if status:
        raise RunError(_describe_failure(command[0], status, log))


def _end_program(process: subprocess.Popen[str]) -> None:
    """End a running program and its process group: with SIGTERM, after a while with SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:  # else another process may have its number
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, number)
                process.wait(_SECONDS_TO_END)


def _describe_failure(name: str, status: int, log: Path) -> str:
    text = "\n" + log.read_text(encoding="utf-8", errors="replace")
    lines = text.rpartition("\n$ ")[2].splitlines()[1:][-_QUOTED_LINES:]  # of this command only
    if message := find_error_line("\n".join(lines)):
        return f"{name}: {message} (its log: {log})"
    end = f"was ended by signal {-status}" if status < 0 else f"failed with exit status {status}"
    if status == -signal.SIGKILL:
        end += " (often for lack of memory)"
    return "\n".join([f"{name} {end}; the end of its log {log}:", *(f"  {line}" for line in lines)])


def run_here(
    tasks: Mapping[str, Task], jobs: int, watch: Callable[[], object] = lambda: None
) -> None:
    """Run tasks in threads, in their order. A failed task stops no other; Ctrl-C stops them all.

    Args:
        tasks: the tasks by their names in messages.
        jobs: number of tasks at a time; if it exceeds the number of GPUs, they share GPUs.
        watch: called in this thread every second.

    Raises:
        RunError: tasks failed.
    """
    gpus = list_gpus()
    free: SimpleQueue[Environment] = SimpleQueue()  # one for each task that may run at a time
    for slot in range(min(jobs, len(tasks))):
        free.put({"CUDA_VISIBLE_DEVICES": gpus[slot % len(gpus)]} if gpus else {})
    failures: list[str] = []
    stopped = False

    def run_task(name: str, task: Task) -> None:
        environment = free.get()
        try:
            task(environment)
        except UserError as error:  # or a RunError
            if not stopped:  # else we ended its program
                say(f"{name}: {error}")
            failures.append(f"{name}: {error}".splitlines()[0].rstrip(" :"))  # no log lines
        finally:
            free.put(environment)

    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(run_task, name, task) for name, task in tasks.items()]
        try:
            while wait(futures, _POLL_SECONDS).not_done:
                watch()
            for future in futures:
                future.result()  # raises a fault of ours
        finally:
            stopped = True
            pool.shutdown(wait=False, cancel_futures=True)
            # Until no task runs: one may be about to start a program when the others are ended.
            while not all(future.done() for future in futures):
                for process in list(_running):
                    _end_program(process)
                time.sleep(_POLL_SECONDS)
    raise_failures(failures, len(tasks))


def raise_failures(failures: list[str], count: int) -> None:
    """Raise a RunError that lists the failures of ``count`` tasks, if there are any."""
    if failures:
        said = f"{len(failures)} of {count} runs failed; the same command tries them again"
        raise RunError(f"{said}: {'; '.join(failures)}")
