"""Runs jobs: on a cluster with ``--on slurm``, or on this machine (:mod:`.local_machine`).

submitit pickles the jobs, submits them, and requeues a job that runs out of time. This module adds
what submitit lacks: it remembers which Slurm jobs belong to an output folder, asks ``squeue`` for
their states (accounting is off on small clusters), and decides what to submit again. Whether a job
is done is read from its folder, as on one machine, so a sweep can move between machine and cluster.
"""

import hashlib
import json
import os
import subprocess
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, Optional

from fairseq_posenc.errors import RunError, UserError
from fairseq_posenc.files import write_whole
from fairseq_posenc.workbench.running.folders import is_locked, lock_folder, read_json_object
from fairseq_posenc.workbench.running.jobs import Job, RunContext
from fairseq_posenc.workbench.running.programs import find_error_line
from fairseq_posenc.workbench.running.progress import say

_DONE = "DONE"  # complete by its folder, whatever Slurm says
_UNLISTED = "ENDED"  # Slurm forgets a job some minutes after its end
_UNKNOWN = "UNKNOWN"  # Slurm has not answered yet
# States of a job that has ended. If its folder is not complete, it failed.
_ENDED = {
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "TIMEOUT",
    _UNLISTED,
}
# Seconds between two calls of squeue.
_SHORTEST_PAUSE = 1.0
_LONGEST_PAUSE = 10.0
# Seconds to wait for the lock of a job's earlier process: on a node that Slurm gave up, or while
# the job is being requeued, it may go on writing for a while.
_LOCK_PATIENCE = 300.0
_SIGNAL_EARLY = 60  # seconds by which Slurm's signal may come too early
_MAX_TIMEOUTS = 10**6  # without limit: _SlurmJob.checkpoint ends a job that makes no progress


class Slurm(NamedTuple):
    """A Slurm cluster with the user's options."""

    options: dict[str, str]  # options of sbatch by their long names
    jobs: Optional[int]  # maximum number of jobs at a time; None for no limit
    detach: bool  # whether the command ends as soon as all jobs are submitted

    @property
    def notice(self) -> int:
        """How many seconds before the end of its time Slurm signals a job."""
        seconds = self.options.get("signal", "@90").partition("@")[2]  # submitit's default
        return int(seconds) if seconds.isdecimal() else 60  # sbatch's default

    def run(self, jobs: Sequence[Job], out: Path) -> None:
        """Submit the jobs that are neither done nor queued, and wait until all have ended.

        Args:
            jobs: all jobs of the command.
            out: folder of the command; on a cluster, all machines must share its file system.

        Raises:
            RunError: jobs failed.
            UserError: Slurm is not available or refuses an option, or another command waits for
                jobs of this folder.
            SystemExit: after ``--detach``.
            KeyboardInterrupt: the user pressed Ctrl-C; the jobs go on.
        """
        if all(job.is_done for job in jobs):
            return
        queue = _Queue(out)
        with lock_folder(queue.folder, "jobs of"):
            queue.submit(jobs, self)
            if self.detach:
                say(f"submitted; the same command without --detach waits; {queue.how_to_end}")
                raise SystemExit(0)
            try:
                failures = queue.wait(jobs)
            except KeyboardInterrupt:
                raise KeyboardInterrupt(
                    f"the jobs go on; the same command waits for them again; {queue.how_to_end}"
                ) from None
        raise_failures(failures, len(jobs))


def refuse_jobs(out: Path) -> None:
    """Refuse an output folder that has queued or running jobs on a cluster.

    Raises:
        UserError: it has some; the message says how to end them.
    """
    if (queue := _Queue(out)).is_busy():
        raise UserError(
            f"{out}: has jobs of --on slurm; wait for them with the same command, or end them: "
            f"{queue.how_to_end}"
        )


def raise_failures(failures: Sequence[str], count: int) -> None:
    """Raise an error that lists the failures of a command's ``count`` jobs, if there are any.

    Raises:
        RunError: a job failed.
    """
    if failures:
        raise RunError(
            f"{len(failures)} of {count} runs failed; the same command tries them again: "
            + "; ".join(failures)
        )


def _has_ended(state: str) -> bool:
    return state.split()[0] in _ENDED


class _Queue:
    """The Slurm jobs of an output folder: recorded there, and listed by squeue under one name.

    A state is a word in capitals, then the nodes or a reason: ``RUNNING node1``.
    """

    def __init__(self, out: Path) -> None:
        self._out = out
        self.folder = out.resolve() / "slurm"
        digest = hashlib.sha256(str(self.folder).encode()).hexdigest()
        self._name = f"fairseq-posenc-{digest[:12]}"
        self._ids_file = self.folder / "jobs.json"
        # The last Slurm id of each job.
        self._ids: dict[str, str] = read_json_object(self._ids_file) or {}
        self.how_to_end = f"scancel --name {self._name} ends them"

    def is_busy(self) -> bool:
        """Check for jobs that are queued or running, or still hold a lock."""
        if not self._ids:
            return False
        words = {state.split()[0] for state in (self._ask_slurm() or {}).values()}
        has_locks = any(is_locked(self._lock_folder(key)) for key in self._ids)
        # A job that is completing goes on only as long as its process holds the lock.
        return has_locks or not words <= {*_ENDED, "COMPLETING"}

    def submit(self, jobs: Sequence[Job], cluster: Slurm) -> None:
        """Submit the jobs that are neither done nor queued, as one array; print all states."""
        if (states := self._ask_slurm()) is None:
            raise UserError("--on slurm: squeue does not answer; is this a machine of a cluster?")
        # Jobs of a command that was killed before it recorded what it had submitted.
        unrecorded = states.keys() - set(self._ids.values())
        if alive := [slurm_id for slurm_id in unrecorded if not _has_ended(states[slurm_id])]:
            subprocess.run(["scancel", *alive], check=True)
        if new := [job for job in jobs if _has_ended(self._find_state(job, states))]:
            keys = list(map(self._name_job, new))
            locks = map(self._lock_folder, keys)
            tasks = [_SlurmJob(job, lock, cluster.notice) for job, lock in zip(new, locks)]
            self._ids.update(zip(keys, _submit(tasks, self.folder, self._name, cluster)))
            write_whole(self._ids_file, json.dumps(self._ids, indent=1) + "\n")
        latest = self._ask_slurm()
        width = max(len(job.label) for job in jobs)
        for job in jobs:
            slurm_id = self._ids.get(self._name_job(job), "")
            say(f"{job.label:{width}}  {slurm_id:9} {self._find_state(job, latest)}")

    def wait(self, jobs: Sequence[Job]) -> list[str]:
        """Wait until all jobs are done or have failed; print each change of a state.

        A failure counts when it is seen twice in a row, as the last files of a job that is done may
        appear on this machine a moment after its end.

        Returns:
            A line for each job that failed.
        """
        states = None
        pending = dict.fromkeys(jobs, _UNKNOWN)  # the word of each job's state when last seen
        failures = []
        pause = _SHORTEST_PAUSE
        while pending:
            if (latest := self._ask_slurm()) is not None:
                states = latest
            for job, previous in list(pending.items()):  # a copy, as jobs that ended are deleted
                state = self._find_state(job, states)
                word = state.split()[0]
                has_changed = word != previous
                has_failed = word in _ENDED and not has_changed
                pending[job] = word
                text = f"{job.label}: {state}"
                if has_failed:
                    text += f": {self._explain_failure(job)}"
                    failures.append(text)
                if has_failed or word == _DONE:
                    del pending[job]
                    say(f"{text} [{len(jobs) - len(pending)} of {len(jobs)} ended]")
                elif word not in _ENDED and has_changed and previous != _UNKNOWN:
                    say(text)  # a first state, after _UNKNOWN, was printed by `submit`
            if pending:
                time.sleep(pause)
                pause = min(1.5 * pause, _LONGEST_PAUSE)
        # The process of a job holds its lock until a moment after its work is done.
        ours = {self._ids.get(self._name_job(job), "") for job in jobs}
        while any(
            slurm_id in ours and state.split()[0] == "RUNNING"
            for slurm_id, state in (self._ask_slurm() or {}).items()
        ):
            time.sleep(_SHORTEST_PAUSE)
        return failures

    def _ask_slurm(self) -> Optional[dict[str, str]]:
        """Ask squeue for the states by job id; None if Slurm does not answer.

        A job is listed until some minutes after its end.
        """
        command = ["squeue", "--noheader", "--array", "--states=all", f"--name={self._name}"]
        try:
            answer = subprocess.run(
                [*command, "--format=%i %T %R"], capture_output=True, text=True, check=True
            )
        except (OSError, subprocess.CalledProcessError):
            return None
        return dict(line.split(maxsplit=1) for line in answer.stdout.splitlines())

    def _lock_folder(self, key: str) -> Path:
        return self.folder / "locks" / key

    def _name_job(self, job: Job) -> str:
        return str(job.folder.relative_to(self._out))

    def _find_state(self, job: Job, states: Optional[dict[str, str]]) -> str:
        """Find the state of a job in Slurm's answer, which is None if there was none."""
        if job.is_done:
            return _DONE
        if states is None:
            return _UNKNOWN
        return states.get(self._ids.get(self._name_job(job), ""), _UNLISTED)

    def _explain_failure(self, job: Job) -> str:
        """Describe in a line why a job failed, from the end of its log."""
        log = self.folder / f"{self._ids[self._name_job(job)]}_0_log.err"
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        lines = [line for line in text.splitlines() if line and not line.startswith("srun: ")]
        last = lines[-1].strip() if lines else "it left no log"
        return f"{find_error_line(text) or last} (its log: {log})"


class _SlurmJob:
    """A job as it runs on the cluster; submitit calls :meth:`checkpoint` when its time is up."""

    def __init__(self, job: Job, lock: Path, notice: int) -> None:
        self._job = job
        self._lock = lock
        self._notice = notice  # seconds between Slurm's signal and the end of the job's time
        self._reached: object = None  # progress the last time that its time was up

    def __call__(self) -> None:
        """Run the job, from where it was interrupted."""
        deadline = time.monotonic() + _LOCK_PATIENCE
        while is_locked(self._lock) and time.monotonic() < deadline:
            time.sleep(_SHORTEST_PAUSE)
        with lock_folder(self._lock, "job of") as lock:
            if not self._job.is_done:
                self._job.run(RunContext(lock, lambda updates, text: say(text) if text else None))

    def checkpoint(self) -> Any:
        """Return the submission that continues the job: the same job, as it resumes by itself.

        submitit calls this on preemption as well, which may come at any time.

        Raises:
            UserError: the job made no progress in all its time, so it would be requeued for ever.
        """
        from submitit.helpers import DelayedSubmission

        if _ask_time_left() < self._notice + _SIGNAL_EARLY:
            reached = self._job.progress
            if reached == self._reached:
                raise UserError("made no progress in all its time; give it more, with time=")
            self._reached = reached
        return DelayedSubmission(self)


def _ask_time_left() -> float:
    """Ask squeue for the seconds until this job's time is up; 0 if Slurm does not say."""
    command = ["squeue", "--noheader", "--format=%e", f"--jobs={os.environ['SLURM_JOB_ID']}"]
    end = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    try:
        return (datetime.fromisoformat(end) - datetime.now()).total_seconds()
    except ValueError:
        return 0.0


def _submit(jobs: Sequence[_SlurmJob], folder: Path, name: str, cluster: Slurm) -> list[str]:
    """Submit jobs as an array; return their ids."""
    try:
        from submitit import SlurmExecutor
        from submitit.core.utils import FailedJobError
    except ImportError:
        raise UserError("--on slurm needs the package submitit: pip install submitit") from None
    executor = SlurmExecutor(folder, max_num_timeout=_MAX_TIMEOUTS)
    executor.update_parameters(
        job_name=name,
        array_parallelism=cluster.jobs or len(jobs),
        additional_parameters={"requeue": True, **cluster.options},
    )
    try:
        with executor.batch():
            submitted = [executor.submit(job) for job in jobs]
    except FailedJobError as error:
        options = " ".join(f"{key}={value}" for key, value in cluster.options.items())
        raise UserError(f"--on slurm {options}: {' '.join(str(error).split())}") from error
    return [job.job_id for job in submitted]
