"""Jobs: work that fills folders step by step, is done once, and goes on after an interruption."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Optional

from fairseq_posenc.errors import UserError
from fairseq_posenc.files import write_whole
from fairseq_posenc.workbench.running.files import read_json
from fairseq_posenc.workbench.running.folders import empty_folder, list_differences, read_object

Inputs = dict[str, Any]  # all that the result of a step depends on, as JSON values
Outputs = dict[str, Any]  # figures that come out of a step, as JSON values
STAMP = "stamp.json"


class Place(NamedTuple):
    """What a step is given where it runs.

    Attributes:
        lock: open file that the step's programs keep open while they live.
        report: takes the updates made so far, and a line to print, if it is not empty.
        environment: variables of its programs: the GPU that is theirs.
    """

    lock: Optional[int] = None
    report: Callable[[int, str], object] = lambda updates, text: None
    environment: Mapping[str, str] = {}


HERE = Place()  # where nobody follows the work
Work = Callable[[Place], Optional[Outputs]]


class Step:
    """Work that fills a folder, whose stamp has its inputs and, at its end, its outputs.

    Args:
        folder: everything the step makes.
        inputs: all that the result depends on, as JSON values.
        work: fills the folder, and may return figures.
        goal: where the work ends, as the updates of a training: JSON values.
        progress: how far the work has come, as a value that changes with every part of it that is
            kept, and is false before the first. Without it, interrupted work is repeated.
        protected: whether a folder in which work with other inputs has begun is refused; otherwise
            that is deleted.
        result: a file in the folder that the work writes at its end. Where it is named, it tells
            that the work is done, and :meth:`do` writes no stamp.
    """

    def __init__(
        self,
        folder: Path,
        inputs: Inputs,
        work: Work = lambda place: None,
        goal: Any = 0,
        progress: Optional[Callable[[], object]] = None,
        protected: bool = False,
        result: Optional[str] = None,
    ) -> None:
        self.folder = folder
        self.inputs = json.loads(json.dumps(inputs))  # tuples become lists, as in the stamp
        self.work, self.goal, self._progress, self._protected = work, goal, progress, protected
        self._result = result

    @property
    def outputs(self) -> Optional[Outputs]:
        """What came out, or None if the step is not done."""
        if self._result:
            return {} if (self.folder / self._result).exists() else None
        stamp = self._read()
        done = self.is_claimed and stamp.get("goal") == self.goal
        return stamp.get("facts") if done else None

    @property
    def progress(self) -> object:
        """How far the work has come."""
        return self._progress() if self._progress else self.outputs is not None

    @property
    def can_continue(self) -> bool:
        """Whether a run with the same inputs has begun there, and is no longer than this one."""
        return self.is_claimed and self._read().get("goal", 0) <= self.goal

    @property
    def is_claimed(self) -> bool:
        """Whether the folder's stamp has the same inputs."""
        return self._read().get("inputs") == self.inputs

    def do(self, place: Place = HERE) -> Outputs:
        """Do the work unless it is done; return what came out.

        Raises:
            UserError: other work has begun in the folder, and is protected.
        """
        if (outputs := self.outputs) is not None:
            return outputs
        if self._result:
            return self.work(place) or {}
        if self._protected:
            self.refuse_others()
        elif not (self._progress and self.can_continue):
            empty_folder(self.folder)
        self.claim()
        outputs = self.work(place) or {}
        self._write(outputs)
        return outputs

    def claim(self) -> None:
        """Make the folder and note the inputs in it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._write(None)

    def refuse_others(self) -> None:
        """Refuse a folder in which work with other inputs has begun.

        Raises:
            UserError: names the differences; or the stamp is damaged.
        """
        known = read_inputs(self.folder)
        differences = [] if known is None else list_differences(known, self.inputs)
        if differences and self.progress:
            raise UserError(
                f"{self.folder} has a run with other settings ({'; '.join(differences)}); choose "
                "another --out, or delete it"
            )

    def _read(self) -> dict[str, Any]:
        return read_object(self.folder / STAMP) or {}  # or it was stopped while it was written

    def _write(self, outputs: Optional[Outputs]) -> None:
        stamp = {"inputs": self.inputs, "goal": self.goal, "facts": outputs}
        write_whole(self.folder / STAMP, json.dumps(stamp, indent=1) + "\n")


def read_inputs(folder: Path) -> Any:
    """Read a folder's inputs from its stamp; None without one.

    Raises:
        UserError: the file is damaged.
    """
    if not (stamp := folder / STAMP).exists():
        return None
    content = read_json(stamp)
    return content.get("inputs") if isinstance(content, dict) else None


class Job(NamedTuple):
    """Steps, done one after the other, here or on a cluster.

    Attributes:
        label: what messages call it.
        folder: of its own, below that of the command.
        steps: what it does.
        updates: of its training, for a progress bar; 0 for none.
    """

    label: str
    folder: Path
    steps: tuple[Step, ...]
    updates: int = 0

    @property
    def outputs(self) -> Optional[Outputs]:
        """What came out of all steps, or None if one of them is not done."""
        outputs: Outputs = {}
        for step in self.steps:
            if (made := step.outputs) is None:
                return None
            outputs |= made
        return outputs

    @property
    def is_done(self) -> bool:
        """Whether there is nothing left to do, by what is in the folders."""
        return self.outputs is not None

    @property
    def progress(self) -> list[object]:
        """How far it has come, as a value that changes whenever it comes further."""
        return [step.progress for step in self.steps]

    def run(self, place: Place) -> None:
        """Do the steps that are not done."""
        for step in self.steps:
            step.do(place)
