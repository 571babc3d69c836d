"""Many runs on a cluster, each a job of its own, through submitit."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fairseq_posenc.errors import UserError
from fairseq_posenc.glue.plan import RESULT, Run
from fairseq_posenc.glue.worker import work
from fairseq_posenc.running.files import write_whole
from fairseq_posenc.running.interruption import Ended
from fairseq_posenc.running.locking import is_held
from fairseq_posenc.running.programs import told_mistake
from fairseq_posenc.running.progress import say

JOB = "job.txt"  # in a run's folder, the job that was submitted for it last
_PAUSE = 10.0  # seconds between two looks at the jobs


class Job:
    """What a job does; submitit calls :meth:`checkpoint` when its time is up or it has to yield."""

    def __call__(self, folder: str) -> None:
        """Work on the run of a folder, from where it is."""
        work(Path(folder))

    def checkpoint(self, folder: str) -> Any:
        """Return the job that goes on: the same, as a run knows how far it is."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, folder)


def work_on_cluster(runs: Sequence[Run], out: Path, options: Sequence[str]) -> list[str]:
    """Submit the runs that no job is at, wait for all, and return a line for each that failed.

    Args:
        runs: what is still to be done.
        out: folder of their folders; all machines have to see it.
        options: ``key=value`` for submitit's ``update_parameters``; ``cluster=NAME`` chooses its
            executor.

    Raises:
        UserError: submitit is not installed, or refuses an option.
        KeyboardInterrupt: Ctrl-C, which has cancelled the jobs by then; or a closed terminal, which
            leaves them alone.
    """
    try:
        import submitit
    except ImportError:
        raise UserError("--submitit needs the package submitit: pip install submitit") from None
    values = parse_options(options)
    try:
        executor = submitit.AutoExecutor(str(out / "submitit"), values.pop("cluster", None))
        executor.update_parameters(**values)
    except (NameError, RuntimeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"--submitit {' '.join(options)}: {reason}") from error
    jobs = {run.folder(out): _job_of(run.folder(out), executor) for run in runs}
    new = [folder for folder, job in jobs.items() if job is None]
    for folder, job in zip(new, executor.map_array(Job(), map(str, new)) if new else []):
        write_whole(folder / JOB, job.job_id)
        jobs[folder] = job
    for run, (folder, job) in zip(runs, jobs.items()):
        how = "" if folder in new else ", submitted before"
        say(f"{run.label}: job {job.job_id}{how}, its output is in {job.paths.stdout}")
    try:
        return _wait(runs, jobs)
    except Ended:
        raise KeyboardInterrupt("the jobs go on; the same command waits for them again") from None
    except KeyboardInterrupt:
        for job in jobs.values():
            job.cancel()
        raise


def _job_of(folder: Path, executor: Any) -> Any:
    """Return the job of an earlier command that is at a run, None if there is none."""
    path = folder / JOB
    if not path.exists():
        return None
    job = executor._executor.job_class(executor.folder, path.read_text(encoding="utf-8"))
    return None if _is_done(folder, job) else job


def _is_done(folder: Path, job: Any) -> bool:
    # Of a job that another process started, the local executor knows nothing.
    return bool(job.done()) and not is_held(folder)


def parse_options(options: Sequence[str]) -> dict[str, Any]:
    """Return options by name; whole numbers as such.

    Raises:
        UserError: one is not of the form ``key=value``.
    """
    values: dict[str, Any] = {}
    for option in options:
        name, equals, value = option.partition("=")
        if not (name and equals):
            raise UserError(f"--submitit {option}: write it as key=value, as in timeout_min=600")
        values[name] = int(value) if value.isdigit() else value
    return values


def _wait(runs: Sequence[Run], jobs: dict[Path, Any]) -> list[str]:
    waiting, failures = list(zip(runs, jobs.items())), []
    while waiting:
        for one in [one for one in waiting if _is_done(*one[1])]:
            waiting.remove(one)
            run, (folder, job) = one
            finished = (folder / RESULT).exists()
            how = "finished" if finished else f"failed, see {job.paths.stderr}"
            say(f"[{len(jobs) - len(waiting)}/{len(jobs)}] {run.label}: {how}")
            if not finished:
                failures.append(f"{run.label}: {_reason(job)}")
        if waiting:
            time.sleep(_PAUSE)
    return failures


def _reason(job: Any) -> str:
    """Return why a job failed, in a line."""
    said = str(job.exception() or "it left no result").strip()
    return told_mistake(said) or said.splitlines()[-1]
