"""Jobs: work that fills folders step by step, is done once, and resumes after an interruption.

A step is done if its folder's stamp has its inputs, its goal and its outputs. So a command that is
started again with the same options finds what is done, and does the rest.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Optional

from fairseq_posenc.errors import UserError
from fairseq_posenc.files import write_whole
from fairseq_posenc.workbench.running.files import read_json
from fairseq_posenc.workbench.running.folders import (
    empty_folder,
    list_differences,
    read_json_object,
)

Inputs = dict[str, Any]  # all that the result of a step depends on, as JSON values
Outputs = dict[str, Any]  # what a step returns, such as figures, as JSON values
STAMP = "stamp.json"  # holds the inputs, the goal and, under "facts", the outputs


class RunContext(NamedTuple):
    """What a step gets from the machine that runs it."""

    lock: Optional[int] = None  # open lock that the step's programs inherit and keep
    # called with the number of updates made so far, and a line to print or ""
    report: Callable[[int, str], object] = lambda updates, text: None
    environment: Mapping[str, str] = {}  # variables for its programs: which GPU is theirs


ALONE = RunContext()  # nothing else uses the folder or shows progress
Work = Callable[[RunContext], Optional[Outputs]]
# Returns a value that changes with every save; something false before the first one.
Progress = Callable[[], object]


class Step:
    """Work that fills a folder, which has a stamp from the beginning.

    Args:
        folder: holds everything that the step makes.
        inputs: all that the result depends on, as JSON values.
        work: fills the folder, and may return outputs.
        goal: where the work ends, such as a number of updates, as a JSON value.
        progress: finds the progress; without it, interrupted work starts from the beginning.
        protected: whether the folder is never emptied, and refused if ``progress`` shows that it
            has work on other inputs. Else such work is deleted.
    """

    def __init__(
        self,
        folder: Path,
        inputs: Inputs,
        work: Work = lambda context: None,
        goal: Any = 0,
        progress: Optional[Progress] = None,
        protected: bool = False,
    ) -> None:
        self.folder = folder
        self.inputs = json.loads(json.dumps(inputs))  # tuples become lists, as in the stamp
        self.work = work
        self.goal = goal
        self._progress = progress
        self._protected = protected

    @property
    def outputs(self) -> Optional[Outputs]:
        """What the work returned; None if the step is not done."""
        stamp = self._read_stamp()
        is_same = stamp.get("inputs") == self.inputs and stamp.get("goal") == self.goal
        return stamp.get("facts") if is_same else None

    @property
    def progress(self) -> object:
        """A value that changes whenever a part of the work is saved; false before."""
        return self._progress() if self._progress else self.outputs is not None

    @property
    def can_continue(self) -> bool:
        """Whether the folder has work on the same inputs, with the same or a smaller goal."""
        return self.is_claimed and self._read_stamp().get("goal", 0) <= self.goal

    @property
    def is_claimed(self) -> bool:
        """Whether the folder's stamp has the same inputs."""
        return self._read_stamp().get("inputs") == self.inputs

    def do(self, context: RunContext = ALONE) -> Outputs:
        """Do the work unless it is done; return its outputs.

        Raises:
            UserError: the folder is protected and has work on other inputs.
        """
        if (outputs := self.outputs) is not None:
            return outputs
        if self._protected:
            self.refuse_others()
        elif self._progress is None or not self.can_continue:  # what is there is of no use
            empty_folder(self.folder)
        self.claim()
        outputs = self.work(context) or {}
        self._write_stamp(outputs)
        return outputs

    def claim(self) -> None:
        """Make the folder, with a stamp of the inputs."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._write_stamp(None)

    def refuse_others(self) -> None:
        """Refuse a folder in which ``progress`` shows work on other inputs.

        Raises:
            UserError: it has some (the message names the differences), or its stamp is damaged.
        """
        recorded = read_inputs(self.folder)
        differences = [] if recorded is None else list_differences(recorded, self.inputs)
        if differences and self.progress:
            raise UserError(
                f"{self.folder} has a run with other settings ({'; '.join(differences)}); choose "
                "another --out, or delete it"
            )

    def _read_stamp(self) -> dict[str, Any]:
        return read_json_object(self.folder / STAMP) or {}  # a damaged stamp counts as none

    def _write_stamp(self, outputs: Optional[Outputs]) -> None:
        stamp = {"inputs": self.inputs, "goal": self.goal, "facts": outputs}
        write_whole(self.folder / STAMP, json.dumps(stamp, indent=1) + "\n")


class ResultStep(Step):
    """Work that is done when the file ``result`` exists, which it writes last.

    It empties no folder and has neither goal nor outputs; only :meth:`claim` writes a stamp.
    """

    def __init__(
        self, folder: Path, inputs: Inputs, work: Work, progress: Progress, result: str
    ) -> None:
        super().__init__(folder, inputs, work, progress=progress)
        self._result = result

    @property
    def outputs(self) -> Optional[Outputs]:
        """Empty if there is the file, else None."""
        return {} if (self.folder / self._result).exists() else None

    def do(self, context: RunContext = ALONE) -> Outputs:
        """Do the work unless it is done; return its outputs."""
        return {} if self.outputs is not None else self.work(context) or {}


def read_inputs(folder: Path) -> Any:
    """Read the inputs in a folder's stamp; None without a stamp.

    Raises:
        UserError: the stamp is damaged.
    """
    if not (stamp := folder / STAMP).exists():
        return None
    content = read_json(stamp)
    return content.get("inputs") if isinstance(content, dict) else None


class Job(NamedTuple):
    """Steps that are done one after the other, on this machine or on a cluster."""

    label: str  # its name in messages
    folder: Path  # its folder, below that of the command
    steps: tuple[Step, ...]
    updates: int = 0  # training updates, for a progress bar; 0 without a bar

    @property
    def outputs(self) -> Optional[Outputs]:
        """The outputs of all steps; None if a step is not done."""
        outputs: Outputs = {}
        for step in self.steps:
            if (step_outputs := step.outputs) is None:
                return None
            outputs |= step_outputs
        return outputs

    @property
    def is_done(self) -> bool:
        """Whether all steps are done, according to their folders."""
        return self.outputs is not None

    @property
    def progress(self) -> list[object]:
        """A value that changes whenever a part of the work is saved."""
        return [step.progress for step in self.steps]

    def run(self, context: RunContext) -> None:
        """Do the steps that are not done."""
        for step in self.steps:
            step.do(context)
