"""Runs on a cluster, each a job of its own, through submitit."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.finetuning.glue.plan import RESULT, Run
from fairseq_posenc.workbench.finetuning.glue.worker import work
from fairseq_posenc.workbench.running.exit_codes import Ended
from fairseq_posenc.workbench.running.files import write_whole
from fairseq_posenc.workbench.running.locks import is_locked
from fairseq_posenc.workbench.running.programs import find_user_error
from fairseq_posenc.workbench.running.progress import say

JOB = "job.txt"  # in a run's folder: the id of its last job
_PAUSE = 10.0  # seconds between two polls of the jobs


class Job:
    """A job; submitit calls :meth:`checkpoint` when its time is up or it is preempted."""

    def __call__(self, folder: str) -> None:
        """Work on the run of a folder, from its last checkpoint."""
        work(Path(folder), lambda update, text: say(text))

    def checkpoint(self, folder: str) -> Any:
        """Build the job that continues: the same, because a run continues by itself."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, folder)


def work_on_cluster(runs: Sequence[Run], out: Path, options: Sequence[str]) -> list[str]:
    """Submit the runs that have no job, wait for all, and return a line for each that failed.

    Args:
        runs: runs that are not finished.
        out: folder of their folders, on a file system that all machines share.
        options: ``key=value`` for submitit's ``update_parameters``; ``cluster=NAME`` chooses its
            executor.

    Raises:
        UserError: submitit is not installed, or refuses an option.
        KeyboardInterrupt: Ctrl-C, after the jobs are cancelled; or a closed terminal, which leaves
            them running.
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
    jobs = {run.folder(out): _find_job(run.folder(out), executor) for run in runs}
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


def _find_job(folder: Path, executor: Any) -> Any:
    """Find the unfinished job of an earlier command; None without one."""
    path = folder / JOB
    if not path.exists():
        return None
    job = executor._executor.job_class(executor.folder, path.read_text(encoding="utf-8"))
    return None if _is_done(folder, job) else job


def _is_done(folder: Path, job: Any) -> bool:
    # The local executor takes a job that another process started for done.
    return bool(job.done()) and not is_locked(folder)


def parse_options(options: Sequence[str]) -> dict[str, Any]:
    """Parse ``key=value`` options; whole numbers become ``int``.

    Raises:
        UserError: an option has another form.
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
    """Describe in a line why a job failed."""
    text = str(job.exception() or "it left no result").strip()
    return find_user_error(text) or text.splitlines()[-1]
