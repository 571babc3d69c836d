"""Runs tasks as jobs on a Slurm cluster, submitted by submitit.

Tasks are given as to ``programs.run_here``, and continue from their last checkpoints: a job that
runs out of time is requeued unchanged; a restarted command cancels its jobs, and submits others.
"""

import hashlib
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from submitit import AutoExecutor
from submitit.core.utils import FailedJobError
from submitit.helpers import Checkpointable

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.running.programs import Task, find_error_line, raise_failures
from fairseq_posenc.workbench.running.progress import say

_POLL_SECONDS = 3.0  # between checks of the jobs


class _Requeued(Checkpointable):
    """A task that submitit submits again when its time is up, by ``Checkpointable.checkpoint``."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def __call__(self) -> None:  # submitit calls it in the job
        self.task({})  # no variables for its programs: Slurm itself selects the GPU


def run_on_slurm(
    tasks: Mapping[str, Task],
    folder: Path,
    options: Mapping[str, str | bool],
    jobs: int | None = None,
    watch: Callable[[], object] = lambda: None,
) -> None:
    """Submit each task as a job, and wait until all have ended; Ctrl-C cancels them.

    Args:
        tasks: the tasks that are not done, by their names in messages.
        folder: for submitit's files; all machines must share its file system.
        options: options of sbatch by their long names.
        jobs: maximum number of jobs at a time; None for no limit.
        watch: called every few seconds.

    Raises:
        RunError: jobs failed; the others run to completion.
        UserError: Slurm is not available, or refuses an option.
    """
    # One name for all jobs of a folder, by which a later command finds and cancels them.
    name = f"fairseq-posenc-{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12]}"
    if _list_jobs(name) is None:
        raise UserError("--on slurm: squeue does not answer; is this a machine of a cluster?")
    _cancel(name)  # of a command that was killed
    executor = AutoExecutor(folder, cluster="slurm", slurm_max_num_timeout=100)  # requeues
    executor.update_parameters(
        name=name,
        slurm_array_parallelism=jobs or len(tasks),
        slurm_additional_parameters={"requeue": True, **options},
    )
    failures: list[str] = []
    try:
        with executor.batch():  # all are submitted at its end, as one array of jobs
            running = {label: executor.submit(_Requeued(task)) for label, task in tasks.items()}
        while running:
            listed = _list_jobs(name)  # before looking for results: a job in neither has failed
            time.sleep(_POLL_SECONDS)
            for label, job in list(running.items()):
                has_result = job.paths.result_pickle.exists()
                if has_result or (listed is not None and job.job_id not in listed):
                    del running[label]
                    if error := (job.exception() if has_result else "no result"):
                        reason = find_error_line(str(error)) or "it failed"
                        failures.append(f"{label}: {reason} (its log: {job.paths.stderr})")
            watch()
    except FailedJobError as error:  # sbatch failed, as for an unknown option
        raise UserError(f"--on slurm {options}: {' '.join(str(error).split())}") from error
    finally:
        _cancel(name)
    raise_failures(failures, len(tasks))


def _list_jobs(name: str) -> set[str] | None:
    """List the ids of jobs that are queued, running or ending; None if Slurm does not answer."""
    # Not by Slurm's accounting, which submitit queries: it is off on small clusters.
    command = f"squeue --noheader --array --name={name} --format=%i 2>/dev/null"
    status, ids = subprocess.getstatusoutput(command)
    return None if status else set(ids.split())


def _cancel(name: str) -> None:
    """Cancel jobs by their name, and wait until their processes have ended."""
    while (listed := _list_jobs(name)) != set():
        subprocess.run(["scancel", f"--name={name}"], check=False)
        if listed is None:
            say(f"--on slurm: squeue does not answer: see whether jobs {name} are left")
            break
        time.sleep(_POLL_SECONDS)
