"""Runs jobs on this machine, some at a time; with fewer GPUs than jobs, jobs share a GPU."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, Optional

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.running.devices import visible_gpus
from fairseq_posenc.workbench.running.executor import raise_failures, refuse_jobs
from fairseq_posenc.workbench.running.folders import lock_folder
from fairseq_posenc.workbench.running.jobs import Job, RunContext
from fairseq_posenc.workbench.running.programs import run_parallel
from fairseq_posenc.workbench.running.progress import bar, say


class LocalMachine(NamedTuple):
    """This machine, whose GPUs are divided among the jobs that run at the same time."""

    jobs: int = 1  # maximum number of jobs at a time
    lock: Optional[int] = None  # lock of the command's folder; None to lock the folder of each job
    keep_going: bool = False  # whether the other jobs go on if one fails, as on a cluster

    def run(self, jobs: Sequence[Job], out: Path) -> None:
        """Run the jobs that are not done; for the arguments see ``Slurm.run``.

        Raises:
            RunError: jobs failed, with ``keep_going``.
            UserError: a job failed, another process works in its folder, or the folder has jobs on
                a cluster.
        """
        refuse_jobs(out)
        gpus = visible_gpus()
        ended = 0
        failures = list[str]()
        # An environment for each job that may run; it names the job's GPU if there are any.
        free = [
            {"CUDA_VISIBLE_DEVICES": gpus[slot % len(gpus)]} if gpus else {}
            for slot in range(self.jobs)
        ]

        def run_job(job: Job) -> str:
            """Run a job; return a line about its failure, or "" if it succeeded."""
            reached = 0
            failure = ""

            def report(updates: int, text: str) -> None:
                nonlocal reached
                progress.update(updates - reached)
                reached = updates
                if text:
                    say(f"[{ended} of {len(jobs)} runs ended] {text}")

            environment = free.pop()
            try:
                self._run_job(job, RunContext(self.lock, report, environment))
            except UserError as error:
                if not self.keep_going:
                    raise
                failure = f"{job.label}: {error}"
            finally:
                free.append(environment)
            report(job.updates, "")  # fills the bar, also for a job that failed
            return failure

        def note_end(failure: str) -> None:
            nonlocal ended
            ended += 1
            if failure:
                say(f"[{ended} of {len(jobs)} runs ended] {failure}")
                # The end of a log follows the first line, which then ends with a colon.
                failures.append(failure.splitlines()[0].rstrip(" :"))

        with bar("all runs", sum(job.updates for job in jobs), " updates") as progress:
            calls = [partial(run_job, job) for job in jobs]
            run_parallel(calls, self.jobs, note_end)
        raise_failures(failures, len(jobs))

    def _run_job(self, job: Job, context: RunContext) -> None:
        """Run a job unless it is done, in a folder that is locked."""
        if job.is_done:
            if not job.updates:  # a job with updates has its part of the progress bar instead
                say(f"{job.label}: done before")
        elif context.lock is not None:
            job.run(context)
        else:
            with lock_folder(job.folder, "run") as lock:
                job.run(context._replace(lock=lock))
