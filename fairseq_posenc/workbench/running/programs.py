"""Runs fairseq's commands: logs them, reads them line by line, and always ends them."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Optional, TypeVar

from fairseq_posenc.errors import RunError, UserError, how_to_install
from fairseq_posenc.host.temporary_folders import delete_temporary_folders
from fairseq_posenc.workbench.running.devices import cores
from fairseq_posenc.workbench.running.die_with_parent import die_with_parent

_QUOTED_LINES = 15  # of the end of a log, in a message
# By default an OpenMP thread that waits for another one spins. With other work on the same cores
# that makes the training several times slower; sleeping costs a few percent on an idle machine. The
# user's own values of both variables win.
_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "PYTHONUNBUFFERED": "1"}
# What stands before a message that explains a failure, so that the end of the log is not shown.
_ERROR_PREFIXES = (
    "fairseq-[a-z-]+: error: ",  # of wrong options, or of a UserError or RunError
    r"fairseq_posenc\.errors\.(?:User|Run)Error: ",  # the same in a traceback, as of a rank
    # hydra's own line. After it may come a traceback, or a line with the first prefix.
    r"Error executing job with overrides: .*\n(?!Traceback|fairseq-)",
)
_USER_ERROR = re.compile(rf"^(?:{'|'.join(_ERROR_PREFIXES)})(\S.*)", re.MULTILINE)
_SECONDS_TO_END = 10.0  # between asking a program to end and killing it
_POLL_SECONDS = 0.2  # waiting without a limit would delay Ctrl-C
Result = TypeVar("Result")
_running: set[subprocess.Popen[str]] = set()  # programs of all threads of this process


def find_command(name: str) -> str:
    """Find a console script, first beside the running Python; return an absolute path as it is.

    Raises:
        UserError: it is not installed.
    """
    beside = Path(sys.executable).parent / name
    path = str(beside) if beside.exists() else shutil.which(name)
    if path is None:
        place = f"neither beside {sys.executable} nor on the PATH"
        raise UserError(f"{name} is {place}: {how_to_install('fairseq')}")
    return path


def find_error_line(output: str) -> Optional[str]:
    """Find the last line in a command's output that is one of our errors; None without one."""
    messages = _USER_ERROR.findall(output)
    return messages[-1] if messages else None


def run_watched(
    command: Sequence[str],
    on_line: Callable[[str], None],
    lock: Optional[int] = None,
    environment: Optional[Mapping[str, str]] = None,
) -> int:
    """Run a command and return its exit status; it is killed if this process dies.

    Args:
        command: name of a console script, or absolute path of a program, and arguments.
        on_line: called with each line of output.
        lock: open lock that the command inherits and keeps.
        environment: environment variables that override the user's.
    """
    process = subprocess.Popen(
        die_with_parent([find_command(command[0]), *command[1:]]),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
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
        assert process.stdout is not None
        for line in process.stdout:
            on_line(line)
        return process.wait()
    finally:
        _end_program(process)
        _running.discard(process)
        delete_temporary_folders()  # of the command, if it was killed


def run_logged(
    command: Sequence[str],
    log: Path,
    lock: Optional[int],
    on_line: Callable[[str], None] = lambda line: None,
    environment: Optional[Mapping[str, str]] = None,
) -> None:
    """Run a command as :func:`run_watched` does, and append it and its output to a log file.

    Raises:
        RunError: the command failed; the message ends with the last lines of the log.
    """
    with open(log, "a", encoding="utf-8", buffering=1) as output:  # a line at a time

        def log_line(line: str) -> None:
            output.write(line)
            on_line(line)

        output.write(f"$ {shlex.join(command)}\n")
        status = run_watched(command, log_line, lock, environment)
    if status:
        raise RunError(_describe_failure(command[0], status, log))


def run_parallel(
    calls: Sequence[Callable[[], Result]],
    jobs: int,
    watch: Optional[Callable[[], None]] = None,
    wave: Optional[int] = None,
    on_end: Callable[[Result], object] = lambda result: None,
) -> None:
    """Call functions that start programs, in threads.

    Ctrl-C or the first failure ends all programs that this process has started, and is raised.

    Args:
        calls: the functions, started in this order.
        jobs: number of calls at a time; it may exceed the number of cores.
        watch: called several times a second.
        wave: number of calls that belong together, such as the trainings of one seed. While a call
            of a wave runs, one of a later wave starts only if fewer calls than cores run.
        on_end: called with each result, as soon as it comes.
    """
    if jobs == 1 and not watch:  # in this thread, so that Ctrl-C interrupts any work
        for call in calls:
            on_end(call())
        return
    wave = wave or len(calls) or 1
    futures: list[Future[Result]] = []
    running: set[Future[Result]] = set()

    def may_begin_next() -> bool:
        index = len(futures)
        oldest = next((n for n, future in enumerate(futures) if future in running), index)
        overtakes = oldest // wave < index // wave  # a call of an earlier wave is running
        limit = min(jobs, cores()) if overtakes else jobs
        return index < len(calls) and len(running) < limit

    with ThreadPoolExecutor(jobs) as pool:
        try:
            while running or len(futures) < len(calls):
                while may_begin_next():
                    futures.append(pool.submit(calls[len(futures)]))
                    running.add(futures[-1])
                done, running = wait(running, _POLL_SECONDS, FIRST_COMPLETED)
                for future in done:
                    on_end(future.result())
                if watch:
                    watch()
        finally:
            # Until no call runs: one may be about to start a program when the others are ended.
            while wait(running, _POLL_SECONDS).not_done:
                end_programs()  # so that their threads end


def end_programs() -> None:
    """End all programs that this process has started."""
    for process in list(_running):
        _end_program(process)


def _end_program(process: subprocess.Popen[str]) -> None:
    """End a running program and its process group: with SIGTERM, after a while with SIGKILL."""
    if process.poll() is not None:
        return
    with suppress(ProcessLookupError):  # it ended meanwhile, and another thread noticed it
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _describe_failure(name: str, status: int, log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_QUOTED_LINES:]
    if message := find_error_line("\n".join(lines)):
        return f"{name}: {message} (its log: {log})"
    end = f"was ended by signal {-status}" if status < 0 else f"failed with exit status {status}"
    if status == -signal.SIGKILL:
        end += " (often for lack of memory)"
    return "\n".join([f"{name} {end}; the end of its log {log}:", *(f"  {line}" for line in lines)])
