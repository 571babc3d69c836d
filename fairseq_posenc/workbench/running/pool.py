"""Runs tasks on this machine: a pool of workers, one GPU each.

A task does nothing if its result exists (:mod:`fairseq_posenc.folders` has an example), so the same
command continues where it stopped::

    run_here({task: partial(fine_tune, task) for task in tasks}, jobs=len(visible_gpus()) or 1)
"""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from queue import SimpleQueue

from fairseq_posenc.errors import RunError, UserError
from fairseq_posenc.workbench.running.devices import visible_gpus
from fairseq_posenc.workbench.running.programs import end_programs
from fairseq_posenc.workbench.running.progress import say

Environment = Mapping[str, str]  # variables for a task's programs: which GPU is theirs
Task = Callable[[Environment], object]
_POLL_SECONDS = 1.0


def run_here(
    tasks: Mapping[str, Task],
    jobs: int,
    watch: Callable[[], object] = lambda: None,
    *,
    keep_going: bool = False,
) -> None:
    """Run tasks in threads, in their order; Ctrl-C or a failure ends all programs.

    Args:
        tasks: the tasks by their names in messages.
        jobs: number of tasks at a time; if it exceeds the number of GPUs, they share GPUs.
        watch: called in this thread, every second and when a task ends.
        keep_going: whether the other tasks go on if one fails.

    Raises:
        UserError: a task failed.
        RunError: tasks failed, with ``keep_going``.
    """
    gpus = visible_gpus()
    free: SimpleQueue[Environment] = SimpleQueue()  # one for each task that may run
    for slot in range(jobs):
        free.put({"CUDA_VISIBLE_DEVICES": gpus[slot % len(gpus)]} if gpus else {})
    failures: list[str] = []

    def run_task(task: Task) -> None:
        environment = free.get()
        try:
            task(environment)
        finally:
            free.put(environment)

    with ThreadPoolExecutor(jobs) as pool:
        names = {pool.submit(run_task, task): name for name, task in tasks.items()}
        try:
            pending = set(names)
            while pending:
                ended, pending = wait(pending, _POLL_SECONDS, FIRST_COMPLETED)
                for future in ended:
                    error = future.exception()
                    if isinstance(error, UserError) and keep_going:  # a RunError is one too
                        say(f"{names[future]}: {error}")
                        reason = str(error).splitlines()[0].rstrip(" :")  # lines of a log follow
                        failures.append(f"{names[future]}: {reason}")
                    elif error:
                        raise error
                watch()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            # Until no task runs: one may be about to start a program when the others are ended.
            while not all(future.done() for future in names):
                end_programs()
                time.sleep(_POLL_SECONDS)
    raise_failures(failures, len(tasks))


def raise_failures(failures: list[str], count: int) -> None:
    """Raise an error that lists the failures of ``count`` tasks, if there are any.

    Raises:
        RunError: a task failed.
    """
    if failures:
        raise RunError(
            f"{len(failures)} of {count} runs failed; the same command tries them again: "
            + "; ".join(failures)
        )
