"""Trains a recipe with an encoding: builds the command and the step of each run, one per seed.

The identity of a training names the folder of its checkpoints, and is the stamp of its steps.
"""

from __future__ import annotations

import hashlib
from argparse import Namespace
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Optional

from fairseq_posenc import specs
from fairseq_posenc.checkpoints.dictionary import check_text_kind
from fairseq_posenc.checkpoints.recovery import LAST
from fairseq_posenc.errors import UserError
from fairseq_posenc.user_dir import USER_DIR
from fairseq_posenc.workbench.running.jobs import Step, Work
from fairseq_posenc.workbench.running.programs import find_command
from fairseq_posenc.workbench.running.progress import say
from fairseq_posenc.workbench.training import recipes
from fairseq_posenc.workbench.training.recipes import TRANSLATION, Recipe
from fairseq_posenc.workbench.training.train.devices import Devices, choose_devices, share_batch
from fairseq_posenc.workbench.training.train.epochs import count_updates_per_epoch

_WITH_VALUE_TRUE = {"update_epoch_batch_itr"}  # options that are written as --OPTION True
# Without GPUs, fairseq does not read its rank from torchrun's environment.
_WITH_RANK = ("--no-python", "sh", "-c", 'exec "$0" "$@" --distributed-rank "$RANK"')
_OPTIONS_ON_PROCESSORS = {  # of several processes without GPUs
    "distributed_no_spawn": True,
    "distributed_init_method": "env://",
    "distributed_backend": "gloo",
    "ddp_backend": "legacy_ddp",
}
_END_OPTIONS = ("max_update", "max_epoch", "stop_time_hours", "stop_min_lr", "patience")
_BATCH_OPTIONS = {"--batch-size", "--max-tokens", "--update-freq"}
_LONGEST_NAME = 100  # characters for changed options; a file name may have 255
_IN_FILE_NAMES = str.maketrans({**dict.fromkeys("(:,/", "-"), "*": "x", ")": None, " ": None})
# Beginnings of options that a run may be continued with, so they are not a part of its identity: an
# update computes the same whatever the start, the length, the output and the speed of the run.
_SAME_RESULT = (
    "--restore-file",
    "--finetune-from-model",
    "--reset-",
    "--max-update",
    "--max-epoch",
    "--stop-time-hours",
    "--save-interval",
    "--keep-",
    "--no-epoch-checkpoints",
    "--validate-interval",
    "--disable-validation",
    "--log-",
    "--no-progress-bar",
    "--tensorboard-",
    "--wandb-",
    "--num-workers",
    "--position-backend",
)


class TrainingData(NamedTuple):
    """The data of a training: a data-bin, or its shards."""

    path: str  # path of the folder; those of several shards are joined by colons
    name: str  # name of the folder


def find_data(paths: str, pairs: bool = False) -> TrainingData:
    """Find the data of a training: a data-bin, several joined by colons, or a folder of shards.

    Args:
        paths: the user's argument.
        pairs: whether the training is a translation, which reads pairs of sentences.

    Raises:
        UserError: a folder does not exist, is not a data-bin, is not finished, or is for another
            task or dictionary; or shards are missing.
    """
    if ":" in paths and Path(paths).is_dir():
        raise UserError(f"{paths}: fairseq splits names at ':'; rename the folder")
    folders = [Path(path) for path in paths.split(":")]
    # Several are shards, and lie in the folder of the data.
    name = folders[0].parent.name if len(folders) > 1 else folders[0].absolute().name
    if shards := sorted(path for path in folders[0].glob("shard*") if path.is_dir()):
        folders = shards
    for folder in folders:
        _check_data_bin(folder, folders[0], pairs)
        _, of, total = folder.name.rpartition("-of-")  # a name such as shard00-of-16
        if of and total.isdigit() and int(total) != len(folders):
            raise UserError(f"{folder} is one of {total} shards, but there are {len(folders)}")
    return TrainingData(":".join(map(str, folders)), name)


def _check_data_bin(folder: Path, first: Path, pairs: bool) -> None:
    if folder.suffix == ".partial":
        raise UserError(f"{folder} is not finished: start its preprocessing again")
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    if not any(folder.glob("dict*.txt")):
        raise UserError(f"{folder} is not a data-bin folder: it has no dict.txt")
    check_text_kind(folder, pairs, "this recipe")
    for path in sorted(folder.glob("dict*.txt")):
        other = first / path.name
        if not other.exists() or path.read_bytes() != other.read_bytes():
            raise UserError(f"{path} differs from that of {first}: all need the same dictionary")


class RunIdentity(NamedTuple):
    """Everything that the result of a training depends on; names the folder."""

    recipe: str  # name of the recipe
    encoding: str  # spec in its canonical form
    data: str  # name of the data's folder
    model: str  # name of one of DecBERT's models, or empty
    changes: dict[str, str]  # the user's options for fairseq-train that change the result

    @property
    def folder(self) -> Path:
        """Folder of the checkpoints, such as ``b_small/wiki/decbert_same-none--lr=2e-4``."""
        name = _escape(f"{self.model}-{self.encoding}" if self.model else self.encoding)
        changes = []
        for option, value in self.changes.items():
            change = option.lstrip("-").replace("-", "_")
            if value:  # without the brackets of a tuple, such as (0.9,0.98)
                change += f"={_escape(value.strip('()'))}"
            changes.append(change)
        if len(" ".join(changes)) > _LONGEST_NAME:
            digest = hashlib.sha256("\n".join(changes).encode()).hexdigest()[:8]
            changes = [f"{len(changes)}-changes-{digest}"]
        # Not joined by commas, which separate paths in other commands.
        return Path("checkpoints", self.recipe, self.data, "--".join([name, *changes]))


def parse_options(words: Sequence[str]) -> dict[str, str]:
    """Parse options for fairseq-train into values by name; the last of repeated ones counts."""
    options: dict[str, str] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            options[name] = value
        elif name:
            options[name] = f"{options[name]} {word}".strip()
    return options


def _escape(text: str) -> str:
    """Replace the characters that shells and fairseq treat specially."""
    return text.translate(_IN_FILE_NAMES)


class RecipeTraining:
    """A recipe with an encoding, trained once for each seed.

    Args:
        recipe: hyper-parameters.
        encoding: spec of the positions.
        args: the options of ``train-recipe``; an ablation has no ``out``, ``init`` and ``seeds``.
        model: name of one of DecBERT's models, or empty.
    """

    def __init__(self, recipe: Recipe, encoding: str, args: Namespace, model: str = "") -> None:
        spec = str(specs.parse(encoding))
        self.recipe, self.encoding, self.args, self.model = recipe, encoding, args, model
        self.data = find_data(args.data, pairs=recipe.name == TRANSLATION)
        self.passed = parse_options(args.after_dashes)  # the user's options for fairseq-train
        _check_options(recipe, args, self.passed)
        names = [name for name in sorted(self.passed) if not name.startswith(_SAME_RESULT)]
        changes = {name: self.passed[name] for name in names}
        self.identity = RunIdentity(recipe.name, spec, self.data.name, model, changes)
        self._folder = args.out or self.identity.folder
        self._seeds: Sequence[int] = args.seeds or recipe.seeds

    @property
    def runs(self) -> list[TrainingRun]:
        """The runs: one for each seed."""
        if not self._seeds:
            return [TrainingRun(self, self._folder, None)]
        return [TrainingRun(self, self._folder / f"seed{seed}", seed) for seed in self._seeds]

    @cached_property
    def words(self) -> list[str]:
        """The part of the command that all runs share, with the devices of this machine."""
        devices = choose_devices(self.args, self.recipe.name)
        options = {
            **_choose_architecture(self.recipe, self.model),
            "position_encoding": self.encoding,
            **self.recipe.all_settings,
            **self.recipe.housekeeping,
            **self._choose_batch(devices),
        }
        del options["fp16"]  # the user chooses the precision
        if devices.on_processors and devices.launch_options:
            options.update(_OPTIONS_ON_PROCESSORS)
        if self.recipe.warmup_epochs:
            options.update(self._convert_schedule(self.recipe.warmup_epochs, options))
        launcher = [find_command("fairseq-train")]
        if devices.launch_options:
            processes = f"--nproc_per_node={devices.gpus}"
            torchrun = [find_command("torchrun"), *devices.launch_options, processes]
            if devices.on_processors:
                torchrun += _WITH_RANK
            launcher = [*torchrun, *launcher]
        return [*launcher, *_format_arguments(self.data, options), devices.mode_option]

    def _choose_batch(self, devices: Devices) -> dict[str, Any]:
        per_device, steps = share_batch(self.recipe, devices, self.args.per_gpu)
        if _BATCH_OPTIONS & self.passed.keys():
            say("options after -- change the batch")
        size = "batch_size" if self.recipe.unit == "sequences" else "max_tokens"
        return {size: per_device, "update_freq": steps, "distributed_world_size": devices.world}

    def _convert_schedule(self, warmup_epochs: int, options: Mapping[str, Any]) -> dict[str, Any]:
        """Convert a schedule in epochs to updates, which fairseq counts."""
        words = [*_format_arguments(self.data, options), *self.args.after_dashes]
        updates = count_updates_per_epoch(words)
        warmup = warmup_epochs * updates
        decay = self.recipe.settings["max_epoch"] * updates - warmup
        say(f"an epoch has {updates} updates: warm-up over {warmup}, decay over {decay}")
        return {"warmup_steps": warmup, "hold_steps": 0, "decay_steps": decay}


class TrainingRun(NamedTuple):
    """A run of a training, with one seed."""

    training: RecipeTraining  # recipe, encoding and options
    folder: Path  # folder of the checkpoints and the log
    seed: Optional[int]  # random seed; None for fairseq's default

    @property
    def end_options(self) -> dict[str, str]:
        """Values of the options that end a training, such as ``max_update``."""
        passed = {
            option.lstrip("-").replace("-", "_"): value
            for option, value in self.training.passed.items()
        }
        options = {**self.training.recipe.all_settings, **passed}
        return {name: str(options[name]) for name in _END_OPTIONS if name in options}

    def step(self, work: Work = lambda context: None) -> Step:
        """Build the step, done only for the same end options; without ``work``, it only looks."""
        return Step(
            self.folder,
            self.training.identity._asdict(),
            work,
            goal=self.end_options,
            progress=self._read_save_time,
            protected=True,
        )

    def _read_save_time(self) -> int:
        """Read when the last checkpoint was saved, in nanoseconds; 0 without one."""
        last = self.folder / LAST
        return last.stat().st_mtime_ns if last.exists() else 0

    def command(self) -> list[str]:
        """Build the whole command, and print what the weights start from."""
        say(self.choose_start())
        words = [*self.training.words, "--save-dir", str(self.folder)]
        args = self.training.args
        if self.seed is not None:
            words += ["--seed", str(self.seed)]
        start = ["--finetune-from-model", str(args.init)] if args.init else []
        return [*words, *start, *args.after_dashes]

    def choose_start(self) -> str:
        """Describe what the weights start from.

        Raises:
            UserError: the folder has another run, or a recipe that starts from a released model has
                no checkpoint to start from.
        """
        last = self.folder / LAST
        init = self.training.args.init
        passed = self.training.passed.keys()
        self.step().refuse_others()
        if last.exists():
            if "--restore-file" in passed:
                raise UserError(
                    f"{last} would be overwritten: leave --restore-file out to continue from it, "
                    "or choose another --out"
                )
            return f"resuming from {last}"
        target = f"checkpoints go to {self.folder}"
        if init:
            if not init.is_file():
                raise UserError(f"--init {init} does not exist")
            return f"starting from the weights of {init}; {target}"
        if passed & {"--restore-file", "--finetune-from-model"}:
            return f"starting from the checkpoint in the options after --; {target}"
        if self.training.recipe.init.startswith("roberta"):
            raise UserError(
                "this recipe starts from a released RoBERTa: name a checkpoint made by "
                "'fairseq-posenc swap' with --init"
            )
        return f"starting from new weights; {target}"


def _check_options(recipe: Recipe, args: Namespace, passed: Mapping[str, str]) -> None:
    if "--save-dir" in passed:
        raise UserError("--save-dir: name the folder with --out, before the two dashes")
    if "--seed" in passed and (args.seeds or recipe.seeds):
        raise UserError("--seed: name the seeds with --seeds 1,2, before the two dashes")
    if args.init and recipe.init == "random":
        raise UserError(f"{recipe.name} starts from new weights: leave --init out")


def _choose_architecture(recipe: Recipe, name: str) -> dict[str, Any]:
    """Choose the options of the architecture; a model without an own one has directions instead."""
    model = recipes.load()["models"][name] if name else {}
    options = {"arch": model.get("arch", recipe.arch)}
    if "arch" not in model and model.get("directions", "both") != "both":
        options["attention_directions"] = model["directions"]
    return options


def _format_arguments(data: TrainingData, options: Mapping[str, Any]) -> list[str]:
    """Format the arguments of fairseq-train."""
    words = [data.path, "--user-dir", str(USER_DIR)]
    for name, value in options.items():
        words.append(f"--{name.replace('_', '-')}")
        if isinstance(value, list):
            words.append(",".join(map(str, value)))
        elif value is not True or name in _WITH_VALUE_TRUE:
            words.append(str(value))
    return words
