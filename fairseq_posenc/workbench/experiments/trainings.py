"""The job of a run: trains a small model with ``fairseq-train``, then evaluates it by a command.

An interrupted training resumes from its last checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from fairseq_posenc.checkpoints.recovery import LAST, ensure_last_checkpoint
from fairseq_posenc.checkpoints.safe_loading import open_checkpoint
from fairseq_posenc.errors import RunError, UserError
from fairseq_posenc.host.divergence import parse_stop_update
from fairseq_posenc.position_parameters import is_position_parameter
from fairseq_posenc.workbench.loading.checkpoints import updates_done
from fairseq_posenc.workbench.running.devices import choose_device, cores
from fairseq_posenc.workbench.running.host import USER_DIR
from fairseq_posenc.workbench.running.jobs import Inputs, Job, Outputs, RunContext, Step
from fairseq_posenc.workbench.running.logs import TRAIN_LOG, parse_line, read_curve_file
from fairseq_posenc.workbench.running.programs import run_logged
from fairseq_posenc.workbench.running.progress import say

# Sums over several threads depend on their number; with one thread, figures are the same on any
# number of cores. Small models also train faster in parallel than one after the other.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class Evaluation(NamedTuple):
    """A command that evaluates a trained model."""

    command: Sequence[str]
    read: Callable[[list[str]], Outputs]  # takes the printed lines, and returns figures by name


def default_jobs() -> int:
    """Return the number of trainings to run at a time: one on a GPU, else one per core."""
    return 1 if choose_device() == "cuda" else cores()


class Training(NamedTuple):
    """A training of a small model, and the evaluation that follows it."""

    label: str  # name in messages
    folder: Path  # folder of the checkpoints and the log
    inputs: Inputs  # all that the training depends on, except the number of updates
    updates: int  # number of updates; a longer training continues a shorter one
    command: Sequence[str]  # command of `fairseq-train`, without `--user-dir`
    evaluation: Evaluation | None = None  # None if the last validation is enough

    def build_job(self) -> Job:
        """Build the job of the training and its evaluation.

        The training is the first step. The outputs are ``position_parameters``, ``seconds``, and
        the figures of the evaluation. If the training diverges, which is a result and not a
        failure, the only output is ``diverged``, the update.
        """
        training = Step(
            self.folder,
            self.inputs,
            self._train,
            goal=self.updates,
            progress=lambda: updates_done(self.folder),
        )
        steps = [training]
        if self.evaluation:
            inputs = {
                "model": training.inputs,
                "updates": self.updates,
                "command": [*self.evaluation.command],
            }
            evaluate = partial(self._evaluate, self.evaluation, training)
            steps.append(Step(self.folder / "measured", inputs, evaluate))
        return Job(self.label, self.folder, tuple(steps), self.updates)

    def _train(self, context: RunContext) -> Outputs:
        """Train up to ``updates`` from the last checkpoint, if any; return the model's figures."""
        folder, updates = self.folder, self.updates
        log = folder / TRAIN_LOG
        saved = updates_done(folder)
        if saved == updates and not _has_last_validation(log, updates):
            # The training was interrupted before its last validation was logged. fairseq would not
            # validate a finished training again, so the training starts from scratch.
            for checkpoint in folder.glob("checkpoint*.pt"):
                checkpoint.unlink()
            saved = 0
        context.report(saved, "")  # moves the progress bar; the empty text prints nothing

        def report(line: str) -> None:
            if entry := parse_line(line):
                context.report(entry.updates, "")

        if saved < updates:  # else only the stamp is missing
            extent = f"to continue at update {saved:,}" if saved else f"for {updates:,} updates"
            say(f"{self.label}: starting fairseq-train {extent}")
            ensure_last_checkpoint(folder)
            try:
                _run_command(self.command, log, context, report)
            except RunError as error:
                if not (update := parse_stop_update(str(error))):
                    raise
                say(f"{self.label}: diverged at update {update:,}")
                return {"diverged": update}
            if not _has_last_validation(log, updates):
                raise UserError(f"{self.command[0]} printed no last validation; see its log {log}")
        if not self.evaluation:
            perplexity = read_curve_file(log).entries[-1].perplexity
            say(f"{self.label}: done; perplexity {perplexity:,.4g}")
        return _read_checkpoint_figures(folder)

    def _evaluate(self, evaluation: Evaluation, training: Step, context: RunContext) -> Outputs:
        """Evaluate the model after its training, unless that diverged; return the figures."""
        if "diverged" in (training.outputs or {}):
            return {}
        lines: list[str] = []
        log = self.folder / "measured" / "validate.log"
        _run_command(evaluation.command, log, context, lines.append)
        if not (figures := evaluation.read(lines)):
            raise UserError(f"{evaluation.command[0]} printed no figures; see its log {log}")
        shown = ", ".join(f"{name} {value:,.4g}" for name, value in figures.items())
        say(f"{self.label}: done; {shown}")
        return figures


def _run_command(
    command: Sequence[str], log: Path, context: RunContext, on_line: Callable[[str], None]
) -> None:
    if command[0] != "fairseq-posenc":  # fairseq's commands must find the package
        command = [*command, "--user-dir", str(USER_DIR)]
    run_logged(command, log, context.lock, on_line, {**_ONE_THREAD, **context.environment})


def _has_last_validation(log: Path, updates: int) -> bool:
    """Check whether a log has the validation at the end of a training."""
    entries = read_curve_file(log).entries if log.is_file() else []
    return bool(entries) and entries[-1].updates == updates


def _read_checkpoint_figures(folder: Path) -> Outputs:
    """Count the position parameters of a trained model, and read the duration of its training.

    The duration is fairseq's: training, validation and checkpoints, without start-up, summed over
    all parts of a resumed training.
    """
    ensure_last_checkpoint(folder)  # an interruption may have prevented fairseq from copying it
    with open_checkpoint(folder / LAST) as state:
        parameters = state["model"].items()
        sizes = [tensor.numel() for name, tensor in parameters if is_position_parameter(name)]
        return {
            "position_parameters": sum(sizes),
            "seconds": state["extra_state"]["previous_training_time"],
        }
