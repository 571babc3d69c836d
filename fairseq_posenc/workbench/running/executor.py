"""Pieces of work on a cluster, each a job of Slurm; ``--on slurm``.

submitit writes the jobs, submits them, and queues a job again whose time is up. Here is what it
leaves open: which jobs belong to a folder, what has become of them, and when to submit another.
Whether a piece is done is read from its folder, as on one machine, never asked of the cluster: so a
sweep can move from one machine to a cluster and back.

The states come from ``squeue``, which every cluster answers, and not from ``sacct``, as accounting
is off on small ones.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Optional

from fairseq_posenc.errors import RunError, UserError
from fairseq_posenc.workbench.running.files import write_whole
from fairseq_posenc.workbench.running.folders import read_object
from fairseq_posenc.workbench.running.locks import is_locked, lock_folder
from fairseq_posenc.workbench.running.programs import find_user_error
from fairseq_posenc.workbench.running.progress import say

_OURS = ("array", "error", "job-name", "nodes", "ntasks", "open-mode", "output", "requeue")
_ENDED = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL"),
    *("OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT", "DONE", "ENDED"),  # the last two are ours
}
_SHORTEST, _LONGEST = 1.0, 10.0  # seconds between two questions to Slurm
# A node that Slurm gave up may still be writing for a while, as may a job that is being requeued.
_PATIENCE = 300.0  # seconds
_NO_LIMIT = 10**6  # how often a job may run out of time; see _Job.checkpoint


class Piece(NamedTuple):
    """Work that fills a folder, and goes on where it was interrupted.

    Attributes:
        label: what messages call it.
        folder: of its own, below that of the command.
        work: does it, in another process and perhaps on another machine. It is given an open lock,
            for the programs that it starts.
        is_done: whether there is nothing left to do, by what is in the folder.
        progress: how far it has come, as something that can be compared.
    """

    label: str
    folder: Path
    work: Callable[[int], object]
    is_done: Callable[[], bool]
    progress: Callable[[], object]


class Slurm(NamedTuple):
    """The cluster, as the user asked for it.

    Attributes:
        options: of sbatch, by their long names.
        jobs: how many at a time; None for no limit.
        detach: whether the command ends as soon as all are submitted.
    """

    options: dict[str, str]
    jobs: Optional[int]
    detach: bool

    def run_all(
        self, pieces: Sequence[Piece], out: Path, watch: Optional[Callable[[], None]] = None
    ) -> None:
        """Have all pieces done, as :meth:`run`.

        Raises:
            RunError: some failed; the others are done by then.
        """
        if failures := self.run(pieces, out, watch):
            raise RunError(
                f"{len(failures)} of {len(pieces)} jobs failed; the same command tries them again: "
                + "; ".join(failures)
            )

    def run(
        self, pieces: Sequence[Piece], out: Path, watch: Optional[Callable[[], None]] = None
    ) -> list[str]:
        """Submit what is neither done nor submitted, and wait until all has ended.

        Args:
            pieces: all of the command.
            out: its folder, on a file system that all machines share.
            watch: called now and then.

        Returns:
            A line for each piece that failed.

        Raises:
            UserError: there is no Slurm, it refuses an option, or another command waits.
            SystemExit: after ``--detach``.
            KeyboardInterrupt: which leaves the jobs alone.
        """
        if all(piece.is_done() for piece in pieces):
            return []
        queue = _Queue(out)
        with lock_folder(queue.folder, "jobs of"):
            queue.submit(pieces, self)
            say(queue.table(pieces))
            if self.detach:
                say(f"submitted; the same command without --detach waits; {queue.how_to_end}")
                raise SystemExit(0)
            try:
                return queue.wait(pieces, watch)
            except KeyboardInterrupt:
                raise KeyboardInterrupt(
                    f"the jobs go on; the same command waits for them again; {queue.how_to_end}"
                ) from None


def add_on(parser: ArgumentParser) -> None:
    """Add ``--on`` and ``--detach``: where the pieces of a command run."""
    parser.add_argument(
        "--on",
        nargs="+",
        default=["local"],
        metavar="WHERE",
        help="local (default), or slurm and options of sbatch, as in slurm partition=gpu gpus=1 "
        "time=12:00:00: a job a piece, of which --jobs run at a time",
    )
    parser.add_argument(
        "--detach", action="store_true", help="with --on slurm: submit, and do not wait"
    )


def parse_place(args: Namespace) -> Optional[Slurm]:
    """Parse ``--on`` and ``--detach``; None for this machine.

    Raises:
        UserError: they cannot be read.
    """
    place, *words = args.on
    if place not in ("local", "slurm"):
        raise UserError(f"--on {place}: is neither local nor slurm")
    if place == "local":
        if args.detach or words:
            raise UserError(f"--on local: goes without {words[0] if words else '--detach'}")
        return None
    options = {}
    for word in words:
        name, equals, value = word.partition("=")
        name = name.lstrip("-").replace("_", "-")
        if not (name and equals and value):
            raise UserError(f"--on slurm {word}: write it as key=value, as in partition=gpu")
        if name in _OURS:
            raise UserError(f"--on slurm {word}: {name} is set here; leave it out")
        options[name] = value
    if "time" not in options:
        raise UserError("--on slurm: say how long a job may take, as in time=12:00:00")
    return Slurm(options, args.jobs, args.detach)


def refuse_jobs(out: Path) -> None:
    """Refuse to work in a folder for which jobs wait or run.

    Raises:
        UserError: there are some; says how to end them.
    """
    if (queue := _Queue(out)).is_busy():
        raise UserError(
            f"{out}: has jobs of --on slurm; wait for them with the same command, or end them: "
            f"{queue.how_to_end}"
        )


class _State(NamedTuple):
    """What ``squeue`` says of a job: its fields ``%T``, ``%N``, ``%M`` and ``%r``."""

    word: str
    nodes: str
    time: str
    reason: str

    @property
    def is_alive(self) -> bool:
        return self.word not in _ENDED

    def __str__(self) -> str:
        if self.word == "PENDING":
            return "waits" + (f" ({self.reason})" if self.reason != "None" else "")
        if self.word == "RUNNING":
            return f"runs on {self.nodes} for {self.time}"
        return self.word.lower().replace("_", " ")


_DONE = _State("DONE", "", "", "")
_UNKNOWN = _State("ENDED", "", "", "")  # some minutes ago, so that Slurm has forgotten it


class _Queue:
    """The jobs of a folder: noted there, and found in Slurm by their common name."""

    def __init__(self, out: Path) -> None:
        self._out, self.folder = out, out.resolve() / "slurm"
        digest = hashlib.sha256(str(self.folder).encode()).hexdigest()
        self._name = f"fairseq-posenc-{digest[:12]}"
        self._note = self.folder / "jobs.json"
        self._ids: dict[str, str] = read_object(self._note) or {}  # the last job of each piece
        self.how_to_end = f"scancel --name {self._name} ends them"

    def is_busy(self) -> bool:
        """Whether jobs wait or run; where Slurm does not answer, whether one holds its lock."""
        if not self._ids:
            return False
        states = self._ask()
        if states is None:
            return any(is_locked(self._lock(key)) for key in self._ids)
        return any(state.is_alive for state in states.values())

    def submit(self, pieces: Sequence[Piece], cluster: Slurm) -> None:
        """Submit the pieces that are not done and have no job, as one array.

        Raises:
            UserError: there is no Slurm, or it refuses an option.
        """
        states = self._ask()
        if states is None:
            raise UserError("--on slurm: squeue does not answer; is this a machine of a cluster?")
        # Of a command that was killed before it had noted what it submitted.
        lost = states.keys() - set(self._ids.values())
        if alive := [job for job in lost if states[job].is_alive]:
            subprocess.run(["scancel", *alive], check=True)
        new = [
            each
            for each in pieces
            if (state := self._look(each, states)) is not _DONE and not state.is_alive
        ]
        if new:
            keys = list(map(self._key, new))
            jobs = [_Job(piece, self._lock(key)) for key, piece in zip(keys, new)]
            self._ids.update(zip(keys, _submit(jobs, self.folder, self._name, cluster)))
            write_whole(self._note, json.dumps(self._ids, indent=1) + "\n")

    def wait(self, pieces: Sequence[Piece], watch: Optional[Callable[[], None]]) -> list[str]:
        """Wait until all pieces are done or have failed; return a line for each that failed."""
        left = {self._key(piece): piece for piece in pieces}
        states = self._ask() or {}
        shown = {key: self._look(piece, states).word for key, piece in left.items()}
        failures, pause = [], _SHORTEST
        while left:
            for key, piece in list(left.items()):
                state = self._look(piece, states)
                is_new, shown[key] = state.word != shown[key], state.word
                text = str(state)
                if not (state.is_alive or state is _DONE):
                    if is_new:
                        continue  # its last files may be seen here a moment later
                    text += f": {self._reason(key)}"
                    failures.append(f"{piece.label}: {text}")
                if not state.is_alive:
                    del left[key]
                    text += f" [{len(pieces) - len(left)} of {len(pieces)} ended]"
                if is_new or not state.is_alive:
                    pause = _SHORTEST
                    say(f"{piece.label}: {text}")
            if watch:
                watch()
            if left:
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST)
                if (asked := self._ask()) is not None:
                    states = asked
        return failures

    def table(self, pieces: Sequence[Piece]) -> str:
        """Format a line for each piece: its label, its job, and the job's state."""
        states = self._ask() or {}
        rows = [
            (each.label, self._ids.get(self._key(each), ""), str(self._look(each, states)))
            for each in pieces
        ]
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        return "\n".join(f"{a:{widths[0]}}  {b:>{widths[1]}}  {c}" for a, b, c in rows)

    def _ask(self) -> Optional[dict[str, _State]]:
        """Ask for the states of all jobs, by their ids; None if Slurm does not answer.

        Slurm lists a job for some minutes after its end.
        """
        command = ["squeue", "--noheader", "--array", "--states=all", f"--name={self._name}"]
        try:
            asked = subprocess.run(
                [*command, "--format=%i|%T|%N|%M|%r"], capture_output=True, text=True, check=True
            )
        except (OSError, subprocess.CalledProcessError):
            return None
        rows = [line.split("|", 4) for line in asked.stdout.splitlines()]
        return {row[0]: _State(*row[1:]) for row in rows}

    def _lock(self, key: str) -> Path:
        return self.folder / "locks" / key

    def _key(self, piece: Piece) -> str:
        return str(piece.folder.relative_to(self._out))

    def _look(self, piece: Piece, states: dict[str, _State]) -> _State:
        if piece.is_done():
            return _DONE
        return states.get(self._ids.get(self._key(piece), ""), _UNKNOWN)

    def _reason(self, key: str) -> str:
        """Describe in a line why a job failed, by the end of its log."""
        log = self.folder / f"{self._ids[key]}_0_log.err"
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        lines = [line for line in text.splitlines() if line and not line.startswith("srun: ")]
        last = lines[-1].strip() if lines else "it left no log"
        return f"{find_user_error(text) or last} (its log: {log})"


class _Job:
    """What runs on the cluster; submitit calls :meth:`checkpoint` when its time is up."""

    def __init__(self, piece: Piece, lock: Path) -> None:
        self._piece, self._lock = piece, lock
        self._reached: object = None  # when the time was up before

    def __call__(self) -> None:
        """Work on the piece, from where it was."""
        with ExitStack() as stack:
            lock = self._enter(stack)
            if not self._piece.is_done():
                self._piece.work(lock)

    def checkpoint(self) -> Any:
        """Build the job that continues: the same, because a piece continues by itself.

        Raises:
            UserError: in all its time it came no further, so that it would be repeated for ever.
        """
        from submitit.helpers import DelayedSubmission

        reached = self._piece.progress()
        if reached == self._reached:
            raise UserError("came no further in all its time; give it more, with time=")
        self._reached = reached
        return DelayedSubmission(self)

    def _enter(self, stack: ExitStack) -> int:
        until = time.monotonic() + _PATIENCE
        while True:
            try:
                return stack.enter_context(lock_folder(self._lock, "job of"))
            except UserError:
                if time.monotonic() > until:
                    raise
                time.sleep(_SHORTEST)


def _submit(jobs: Sequence[_Job], folder: Path, name: str, cluster: Slurm) -> list[str]:
    """Submit jobs as an array; return their ids."""
    try:
        from submitit import SlurmExecutor
        from submitit.core.utils import FailedJobError
    except ImportError:
        raise UserError("--on slurm needs the package submitit: pip install submitit") from None
    executor = SlurmExecutor(folder, max_num_timeout=_NO_LIMIT)
    executor.update_parameters(
        job_name=name,
        array_parallelism=cluster.jobs or len(jobs),
        additional_parameters={"requeue": True, **cluster.options},
    )
    try:
        with executor.batch():
            submitted = [executor.submit(job) for job in jobs]
    except FailedJobError as error:
        given = " ".join(f"{key}={value}" for key, value in cluster.options.items())
        raise UserError(f"--on slurm {given}: {' '.join(str(error).split())}") from error
    return [job.job_id for job in submitted]
