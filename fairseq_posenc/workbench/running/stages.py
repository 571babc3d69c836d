"""Steps that are done once: each notes what it was made from, and what came out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

from fairseq_posenc.workbench.running.files import write_whole

Outputs = dict[str, Any]  # figures that come out of a step, as JSON values
_STAMP = "stamp.json"


class Stage:
    """A piece of work that fills a folder of its own, and a stamp in it that tells its inputs.

    Args:
        folder: everything the step makes; emptied when the inputs have changed.
        inputs: all that the result depends on, as JSON values.
        goal: how far to go, where a longer run continues a shorter one (updates of a training).
    """

    def __init__(self, folder: Path, inputs: Outputs, goal: int = 0) -> None:
        self.folder = folder
        self.inputs = json.loads(json.dumps(inputs))  # tuples become lists, as in the stamp
        self.goal = goal

    @property
    def facts(self) -> Optional[Outputs]:
        """What came out, or None if the step is not done."""
        stamp = self._read()
        done = self._is_same(stamp) and stamp.get("goal") == self.goal
        return stamp.get("facts") if done else None

    @property
    def can_continue(self) -> bool:
        """Whether the folder holds a beginning that leads to this result."""
        stamp = self._read()
        return self._is_same(stamp) and stamp.get("goal", 0) <= self.goal

    def do(self, work: Callable[[], Outputs], keep_unfinished: bool = False) -> Outputs:
        """Do the work unless it is done; return what came out.

        Args:
            work: fills the folder and returns figures.
            keep_unfinished: leave what an interrupted run with the same inputs made to ``work``.
        """
        if (facts := self.facts) is not None:
            return facts
        if not (keep_unfinished and self.can_continue):
            shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._write(None)
        facts = work()
        self._write(facts)
        return facts

    def _is_same(self, stamp: Outputs) -> bool:
        return stamp.get("inputs") == self.inputs

    def _read(self) -> Outputs:
        try:
            stamp = json.loads((self.folder / _STAMP).read_text(encoding="utf-8"))
        except (
            OSError,
            ValueError,
            RecursionError,
        ):  # never begun, or stopped while the stamp was written
            return {}
        return stamp if isinstance(stamp, dict) else {}

    def _write(self, facts: Optional[Outputs]) -> None:
        stamp = {"inputs": self.inputs, "goal": self.goal, "facts": facts}
        write_whole(self.folder / _STAMP, json.dumps(stamp, indent=1) + "\n")
