"""Work in folders that is done once and can be continued.

A :class:`Job` fills one :class:`Stage` or several: folders with a stamp, by which the next call
knows what is done. It runs here, beside others, or on a cluster.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Optional

from fairseq_posenc.errors import UserError
from fairseq_posenc.files import write_whole
from fairseq_posenc.workbench.running.files import read_json
from fairseq_posenc.workbench.running.folders import list_differences, read_object

Inputs = dict[str, Any]  # all that the result of a stage depends on, as JSON values
Outputs = dict[str, Any]  # figures that come out of a stage, as JSON values
STAMP = "stamp.json"


class Place(NamedTuple):
    """What a job is given where it runs.

    Attributes:
        lock: open file that the job's programs keep open while they live.
        report: takes the updates made so far, and a line to print, if it is not empty.
        environment: variables of its programs: the GPU that is theirs.
    """

    lock: int
    report: Callable[[int, str], object]
    environment: Mapping[str, str]


class Job(NamedTuple):
    """Work that fills a folder, and goes on where it was interrupted.

    Attributes:
        label: what messages call it.
        folder: of its own, below that of the command.
        work: does it, on this machine or on another.
        is_done: whether there is nothing left to do, by what is in the folder.
        progress: how far it has come, as a value that changes with every step.
        updates: of a training, for a progress bar; 0 for none.
    """

    label: str
    folder: Path
    work: Callable[[Place], object]
    is_done: Callable[[], bool]
    progress: Callable[[], object]
    updates: int = 0


class Stage:
    """A step of work in a folder of its own, with a stamp of its inputs and outputs.

    :meth:`do` starts afresh where the inputs have changed; a training that takes hours is rather
    :meth:`claimed <claim>`, after :meth:`refuse_others`.

    Args:
        folder: everything the stage makes.
        inputs: all that the result depends on, as JSON values.
        max_updates: updates of a training, where a longer one continues a shorter one.
    """

    def __init__(self, folder: Path, inputs: Inputs, max_updates: int = 0) -> None:
        self.folder = folder
        self.inputs = json.loads(json.dumps(inputs))  # tuples become lists, as in the stamp
        self.max_updates = max_updates

    @property
    def outputs(self) -> Optional[Outputs]:
        """What came out, or None if the stage is not done."""
        stamp = self._read()
        done = self.is_claimed and stamp.get("goal") == self.max_updates
        return stamp.get("facts") if done else None

    @property
    def can_continue(self) -> bool:
        """Whether a run with the same inputs has begun there, and is no longer than this one."""
        return self.is_claimed and self._read().get("goal", 0) <= self.max_updates

    @property
    def is_claimed(self) -> bool:
        """Whether the folder's stamp has the same inputs."""
        return self._read().get("inputs") == self.inputs

    def do(self, work: Callable[[], Outputs], keep_unfinished: bool = False) -> Outputs:
        """Do the work unless it is done; return what came out.

        Args:
            work: fills the folder and returns figures.
            keep_unfinished: leave what an interrupted run with the same inputs made to ``work``.
        """
        if (outputs := self.outputs) is not None:
            return outputs
        if not (keep_unfinished and self.can_continue):
            shutil.rmtree(self.folder, ignore_errors=True)
        self.claim()
        outputs = work()
        self.finish(outputs)
        return outputs

    def claim(self) -> None:
        """Make the folder and note the inputs in it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._write(None)

    def finish(self, outputs: Outputs) -> None:
        """Note that the work is done, and what came out."""
        self._write(outputs)

    def refuse_others(self, begun: Callable[[], bool]) -> None:
        """Refuse a folder in which work with other inputs has begun.

        Args:
            begun: tells whether anything has been made there.

        Raises:
            UserError: names the differences; or the stamp is damaged.
        """
        known = read_inputs(self.folder)
        differences = [] if known is None else list_differences(known, self.inputs)
        if differences and begun():
            raise UserError(
                f"{self.folder} has a run with other settings ({'; '.join(differences)}); choose "
                "another --out, or delete it"
            )

    def _read(self) -> dict[str, Any]:
        return read_object(self.folder / STAMP) or {}  # or it was stopped while it was written

    def _write(self, outputs: Optional[Outputs]) -> None:
        # In the file, "goal" is `max_updates` and "facts" are the outputs.
        stamp = {"inputs": self.inputs, "goal": self.max_updates, "facts": outputs}
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
