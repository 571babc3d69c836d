"""Plans the runs: one for each task, learning rate and seed, each in a folder of its own."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fairseq_posenc.errors import UserError
from fairseq_posenc.tasks.glue.data import DataBin
from fairseq_posenc.workbench.finetuning.glue.configuration import Grid, Settings
from fairseq_posenc.workbench.loading.checkpoints import updates_done
from fairseq_posenc.workbench.loading.pretrained import Pretrained
from fairseq_posenc.workbench.running.host import USER_DIR
from fairseq_posenc.workbench.running.locks import lock_folder
from fairseq_posenc.workbench.running.stages import STAMP, Stage, read_inputs

_NAMES = {"modified": "version of the checkpoint"}  # of fields, in messages
_PLAIN = re.compile(r"[A-Za-z_./][\w./+-]*")
RESULT = "result.json"  # written last


class Run(NamedTuple):
    """One fine-tuning.

    Attributes:
        protocol: name of the protocol.
        task: name of the task.
        learning_rate: peak learning rate.
        seed: random seed.
        metric: metric that chooses the checkpoint.
        max_update: number of updates.
        data: folder of the data-bin.
        checkpoint: checkpoint of the pre-trained model.
        modified: modification time of the checkpoint, in nanoseconds.
        command: ``fairseq-hydra-train`` and its arguments, without the checkpoint to start from.
    """

    protocol: str
    task: str
    learning_rate: float
    seed: int
    metric: str
    max_update: int
    data: str
    checkpoint: str
    modified: int
    command: list[str]

    @property
    def label(self) -> str:
        """Name of the run in messages."""
        return f"{self.task}, learning rate {self.learning_rate:g}, seed {self.seed}"

    def folder(self, out: Path) -> Path:
        """Build the path of the run's folder."""
        return out / self.task / f"lr{self.learning_rate:g}-seed{self.seed}"


class Request(NamedTuple):
    """The settings that all runs share.

    Attributes:
        protocol: name of the protocol.
        out: folder of the runs, absolute.
        configs: folder of the YAML files.
        pretrained: the model to start from, its path absolute.
        overrides: the user's hydra overrides.
    """

    protocol: str
    out: Path
    configs: Path
    pretrained: Pretrained
    overrides: Sequence[str]

    def plan_runs(self, data: DataBin, settings: Settings, grid: Grid) -> list[Run]:
        """Plan the runs of a task."""
        runs = [
            Run(
                protocol=self.protocol,
                task=data.task.name,
                learning_rate=rate,
                seed=seed,
                metric=settings.metric,
                max_update=settings.max_update,
                data=str(data.path),
                checkpoint=str(self.pretrained.path),
                modified=self.pretrained.path.stat().st_mtime_ns,
                command=[],
            )
            for rate in grid.learning_rates
            for seed in grid.seeds
        ]
        return [run._replace(command=self._command(run, settings)) for run in runs]

    def _command(self, run: Run, settings: Settings) -> list[str]:
        model, folder = self.pretrained, run.folder(self.out)
        chosen = {word.lstrip("+").partition("=")[0] for word in self.overrides}
        values: dict[str, Any] = {
            "hydra.run.dir": folder,
            "common.user_dir": USER_DIR,
            "common.seed": run.seed,
            "task.data": run.data,
            "task.max_positions": model.max_positions,
            **{
                f"{'' if name in settings.model else '+'}model.{name}": value
                for name, value in model.options.items()
                if f"model.{name}" not in chosen
            },
            "optimization.lr": [run.learning_rate],
            "optimization.max_update": run.max_update,
            "lr_scheduler.warmup_updates": settings.warmup_updates,
            "checkpoint.save_dir": folder,
        }
        return [
            *("fairseq-hydra-train", "--config-dir", str(self.configs.resolve())),
            *("--config-name", settings.name),
            *(format_override(name, value) for name, value in values.items()),
            *self.overrides,
        ]


def format_override(name: str, value: Any) -> str:
    """Format a hydra override; texts with brackets, commas and so on are quoted."""
    if isinstance(value, (str, Path)):
        if _PLAIN.fullmatch(str(value)):
            return f"{name}={value}"
        escaped = str(value).replace("\\", "\\\\").replace("'", "\\'")
        return f"{name}='{escaped}'"
    return f"{name}={json.dumps(value)}"


def prepare(run: Run, out: Path) -> bool:
    """Note the plan of a run in its folder; return whether the run is finished.

    Raises:
        UserError: the folder has a run with other settings that has begun or is in use.
    """
    folder = run.folder(out)
    stage = Stage(folder, run._asdict())
    stage.refuse_others(lambda: has_begun(folder))
    if not stage.is_claimed:
        with lock_folder(folder, "run"):
            stage.claim()
    return (folder / RESULT).exists()


def has_begun(folder: Path) -> bool:
    """Tell whether a run has a result or a checkpoint."""
    return (folder / RESULT).exists() or updates_done(folder) > 0


def list_runs(out: Path, like: Run) -> list[Run]:
    """List the runs of a folder, also those of earlier commands.

    Runs of another model or protocol that have not begun are left out.

    Raises:
        UserError: a run that has begun is of another model or protocol.
    """
    runs = []
    stamps = (STAMP, "run.json")  # the latter in folders of earlier versions
    folders = {path.parent for name in stamps for path in out.glob(f"*/*/{name}")}
    for folder in sorted(folders):
        run = read_run(folder)
        names = ("protocol", "checkpoint", "modified")
        other = [name for name in names if getattr(run, name) != getattr(like, name)]
        if other and has_begun(folder):
            raise UserError(
                f"{folder} has a run with another {_NAMES.get(other[0], other[0])}; choose "
                "another --out, or delete it"
            )
        if not other:
            runs.append(run)
    return runs


def read_run(folder: Path) -> Run:
    """Read the plan of a run.

    Raises:
        UserError: its file holds none.
    """
    inputs = read_inputs(folder)
    if not isinstance(inputs, dict) or inputs.keys() != set(Run._fields):
        raise UserError(f"{folder}: has no run of glue; delete it")
    return Run(**inputs)
