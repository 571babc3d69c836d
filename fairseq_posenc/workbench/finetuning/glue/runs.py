"""Plans the runs of GLUE: one for each task, learning rate and seed, each in its own folder.

The folder of a run, such as ``OUT/RTE/lr2e-05-seed1``, has a file with all fields of its
:class:`GlueRun`, and is refused for a run with others (:mod:`fairseq_posenc.folders`).
"""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

from fairseq_posenc import folders
from fairseq_posenc.checkpoints.recovery import LAST, newest_checkpoint
from fairseq_posenc.errors import UserError
from fairseq_posenc.tasks.glue.data import find_training_data
from fairseq_posenc.tasks.glue.definitions import Task
from fairseq_posenc.user_dir import find_shipped_folder
from fairseq_posenc.workbench.finetuning import recipes
from fairseq_posenc.workbench.loading.pretrained import Pretrained

CONFIGS = find_shipped_folder("finetune_configs") / "glue"
RESULT = "result.json"  # a run's metrics


class GlueRun(NamedTuple):
    """A fine-tuning run with one task, learning rate and seed."""

    task: str  # name of the task
    learning_rate: float  # peak learning rate
    seed: int
    metric: str  # metric on the development set that chooses the checkpoint
    max_update: int  # number of updates
    config: str  # path of the YAML file
    settings: dict[str, str]  # overrides of the file: the texts before and after `=`

    @property
    def command(self) -> list[str]:
        """The command that trains the run."""
        return recipes.build_command(Path(self.config), self.settings)

    @property
    def label(self) -> str:
        """Name of the run in messages."""
        return f"{self.task}, learning rate {self.learning_rate:g}, seed {self.seed}"

    def folder(self, out: Path) -> Path:
        """Build the path of the run's folder."""
        return out / self.task / f"lr{self.learning_rate:g}-seed{self.seed}"

    def is_finished(self, out: Path) -> bool:
        """Check for the result, and that the last checkpoint was deleted, which comes last."""
        folder = self.folder(out)
        return (folder / RESULT).exists() and not (folder / LAST).exists()


class GlueRequest(NamedTuple):
    """The user's choices for the fine-tuning runs of a model."""

    protocol: str  # `m4m` or `decbert`
    tasks: Sequence[Task]
    data: Path  # folder of their data-bins
    pretrained: Pretrained  # the model to start from, its path absolute
    out: Path  # folder of the runs, absolute
    rates: Sequence[float]  # peak learning rates; empty: as in the YAML files
    seeds: Sequence[int]  # random seeds; empty: as in the YAML files
    overrides: Sequence[str]  # hydra overrides


def plan_runs(request: GlueRequest) -> list[GlueRun]:
    """Plan the runs of all tasks.

    Raises:
        UserError: a task has no data, its data have another dictionary, an example is longer than
            the model's positions, or an override cannot be used.
    """
    runs = []
    pretrained = request.pretrained
    for task in request.tasks:
        data = find_training_data(request.data, task)
        pretrained.check_dictionary(data.dictionary)
        data.check_lengths(pretrained.max_positions, pretrained.path)
        path = CONFIGS / f"{task.config_name(request.protocol)}.yaml"
        cfg = recipes.compose_recipe(path, data.splits["train"]["examples"], request.overrides)
        if (metric := cfg.checkpoint.best_checkpoint_metric) == "loss":  # which is not reported
            raise UserError("--set checkpoint.best_checkpoint_metric: give a metric of the tasks")
        # The user's options win, then the file's lists, then its values for a single run.
        rates = request.rates or cfg.task.learning_rates or cfg.optimization.lr[:1]
        seeds = request.seeds or cfg.task.seeds or [cfg.common.seed]
        for rate, seed in product(rates, seeds):
            run = GlueRun(
                task=task.name,
                learning_rate=rate,
                seed=seed,
                metric=metric,
                max_update=cfg.optimization.max_update,  # computed from `examples` if not set
                config=str(path.resolve()),  # text, because `claim` writes the fields as JSON
                settings={},  # set below, as they name the folder of this run
            )
            values = {
                "common.seed": seed,
                "task.data": data.path,
                "task.max_positions": pretrained.max_positions,
                "optimization.lr": [rate],
                "optimization.max_update": cfg.optimization.max_update,
                "lr_scheduler.warmup_updates": cfg.lr_scheduler.warmup_updates,  # computed as above
                "checkpoint.save_dir": run.folder(request.out),
            }
            settings = recipes.build_settings(pretrained, values, request.overrides)
            runs.append(run._replace(settings=settings))
    return runs


def claim(run: GlueRun, out: Path) -> None:
    """Record a run's fields in its folder; empty a folder whose run saved no checkpoint.

    Raises:
        UserError: the folder has a run with other fields or somebody else's files, or is in use.
    """
    folder = run.folder(out)
    with folders.lock_folder(folder):
        has_results = newest_checkpoint(folder) is not None or (folder / RESULT).exists()
        folders.claim(folder, run._asdict(), has_results=has_results)


def list_runs(out: Path) -> list[GlueRun]:
    """List the runs in a folder, also earlier ones; refuse one that another version began."""
    found = {path: folders.read_json(path) for path in sorted(out.glob(f"*/*/{folders.REQUEST}"))}
    for path, fields in found.items():
        if not isinstance(fields, dict) or fields.keys() != {*GlueRun._fields}:
            raise UserError(f"{path.parent}: is a run of another version; delete that folder")
    return [GlueRun(**fields) for fields in found.values()]
