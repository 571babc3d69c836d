"""Many runs on a cluster, each a job of its own, through submitit."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fairseq_posenc.errors import UserError
from fairseq_posenc.glue.plan import Run
from fairseq_posenc.glue.worker import work
from fairseq_posenc.running.programs import told_mistake
from fairseq_posenc.running.progress import say

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
    """Submit the runs, wait for them, and return a line for each that failed.

    Args:
        runs: what is still to be done.
        out: folder of their folders; all machines have to see it.
        options: ``key=value`` for submitit's ``update_parameters``; ``cluster=NAME`` chooses its
            executor.

    Raises:
        UserError: submitit is not installed, or refuses an option.
        KeyboardInterrupt: Ctrl-C; the jobs are cancelled by then.
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
    jobs = executor.map_array(Job(), [str(run.folder(out)) for run in runs])
    for run, job in zip(runs, jobs):
        say(f"{run.label}: job {job.job_id}, its output is in {job.paths.stdout}")
    try:
        return _wait(runs, jobs)
    except KeyboardInterrupt:
        for job in jobs:
            job.cancel()
        raise


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


def _wait(runs: Sequence[Run], jobs: Sequence[Any]) -> list[str]:
    waiting, failures = list(zip(runs, jobs)), []
    while waiting:
        for run, job in [pair for pair in waiting if pair[1].done()]:
            waiting.remove((run, job))
            error = job.exception()
            how = "finished" if error is None else f"failed, see {job.paths.stderr}"
            say(f"[{len(jobs) - len(waiting)}/{len(jobs)}] {run.label}: {how}")
            if error is not None:
                said = str(error).strip()
                failures.append(f"{run.label}: {told_mistake(said) or said.splitlines()[-1]}")
        if waiting:
            time.sleep(_PAUSE)
    return failures
