"""The commands behind one training: ``fairseq-train``, and what measures the model."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from fairseq_posenc.checkpoints.recovery import LAST
from fairseq_posenc.workbench.experiments.settings import TASKS, TRAIN_OPTIONS, WHOLE, Settings
from fairseq_posenc.workbench.experiments.trainings import measuring_command, training_options
from fairseq_posenc.workbench.experiments.variants import Variant


class Run(NamedTuple):
    """One training of a comparison.

    Attributes:
        contender: the model.
        lr: its learning rate, as the user wrote it.
        seed: of initial weights, order of the data and masks.
    """

    contender: Variant
    lr: str
    seed: int

    @property
    def label(self) -> str:
        """What messages call it."""
        return f"{self.contender.name}, learning rate {self.lr}, seed {self.seed}"


def all_runs(settings: Settings) -> list[Run]:
    """Return the trainings, seed after seed, so that an early end leaves whole seeds."""
    return [
        Run(contender, lr, seed)
        for seed in settings.seeds
        for contender in settings.contenders
        for lr in settings.lrs
    ]


def data_folder(settings: Settings) -> Path:
    """Return the folder that ``fairseq-preprocess`` fills."""
    return settings.out / "data" / "binary"


def model_folder(settings: Settings, run: Run) -> Path:
    """Return the folder of one model's checkpoints and log."""
    return settings.out / "models" / run.contender.folder / f"lr-{run.lr}-seed-{run.seed}"


def model_options(settings: Settings, run: Run) -> list[str]:
    """Return the options of ``fairseq-train`` that tell what is trained on what."""
    return [
        *TRAIN_OPTIONS[settings.family],
        *run.contender.options,
        *settings.train_args,
        "--lr",
        run.lr,
    ]


def train_command(settings: Settings, run: Run) -> list[str]:
    """Return the command that trains one model, but for where it finds the package."""
    every = settings.validate_every
    return [
        *("fairseq-train", str(data_folder(settings))),
        *training_options(model_folder(settings, run), settings.updates, run.seed, every),
        *model_options(settings, run),
    ]


def measure_command(settings: Settings, run: Run) -> list[str]:
    """Return the command that measures one trained model, but for where it finds the package.

    It is ``fairseq-validate`` at the length of training, ``lm-length`` at another.
    """
    data, model = data_folder(settings), model_folder(settings, run)
    if settings.read in (0, settings.trained):
        batches = ["--max-tokens", settings.option("--max-tokens"), *WHOLE]
        return measuring_command(data, model, "--task", TASKS[settings.family], *batches)
    return [
        *("fairseq-posenc", "lm-length", "--data", str(data), "--lengths", str(settings.read)),
        *("--mode", "non-overlapping", "--out", str(read_folder(settings, run))),
        f"read={model / LAST}",
    ]


def read_folder(settings: Settings, run: Run) -> Path:
    """Return where ``lm-length`` puts its figures of one model."""
    return model_folder(settings, run) / f"read-{settings.read}"
