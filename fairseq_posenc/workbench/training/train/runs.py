"""A training of a recipe: its data, its identity, and the command of each of its runs."""

from __future__ import annotations

import hashlib
from argparse import Namespace
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Optional

from fairseq_posenc import specs
from fairseq_posenc.errors import UserError
from fairseq_posenc.user_dir import USER_DIR
from fairseq_posenc.workbench.running.programs import find_command
from fairseq_posenc.workbench.running.progress import say
from fairseq_posenc.workbench.running.stages import Stage
from fairseq_posenc.workbench.training import recipes
from fairseq_posenc.workbench.training.recipes import Recipe
from fairseq_posenc.workbench.training.train.devices import Devices, choose_devices, share_batch


class Data(NamedTuple):
    """One data-bin, or the shards of one."""

    path: str  # of the folder, or of several, joined by colons
    name: str  # of the folder


def find_data(given: str) -> Data:
    """Find the data of a training: a data-bin, several joined by colons, or a folder of shards.

    Raises:
        UserError: there is no such folder, or one that is no data-bin, not finished, or of another
            dictionary than the first; or shards are missing.
    """
    if ":" in given and Path(given).is_dir():
        raise UserError(f"{given}: fairseq splits names at ':'; rename the folder")
    folders = [Path(part) for part in given.split(":")]
    name = folders[0].parent.name if len(folders) > 1 else folders[0].absolute().name
    if shards := sorted(path for path in folders[0].glob("shard*") if path.is_dir()):
        folders = shards
    for folder in folders:
        _check_data_bin(folder, folders[0])
        whole = folder.name.rpartition("-of-")[2]  # shard00-of-16 is one of 16
        if whole.isdigit() and int(whole) != len(folders):
            raise UserError(f"{folder} is one of {whole} shards, and {len(folders)} are given")
    return Data(":".join(map(str, folders)), name)


def _check_data_bin(folder: Path, first: Path) -> None:
    if folder.suffix == ".partial":
        raise UserError(f"{folder} is not finished: start its preprocessing again")
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}")
    if not any(folder.glob("dict*.txt")):
        raise UserError(f"{folder} is no data-bin folder: it has no dict.txt")
    own, others = folder / "dict.txt", first / "dict.txt"
    if own.exists() and own.read_bytes() != others.read_bytes():
        raise UserError(f"{own} is not that of {first}: its numbers mean other tokens")


LAST = "checkpoint_last.pt"
_LONGEST = 100  # characters of a name, of the 255 that a file may have
_IN_FILE_NAMES = str.maketrans({**dict.fromkeys("(:,/", "-"), "*": "x", ")": None, " ": None})
# Where a run continues, its length, output and speed: these do not change its result.
_SAME_RUN = (
    *("--restore-file", "--finetune-from-model", "--reset-", "--max-update", "--max-epoch"),
    *("--stop-time-hours", "--save-interval", "--keep-", "--no-epoch-checkpoints"),
    *("--validate-interval", "--disable-validation", "--log-", "--no-progress-bar"),
    *("--tensorboard-", "--wandb-", "--num-workers", "--position-backend"),
)


class RunIdentity(NamedTuple):
    """Everything that the result of a training depends on; it names the folder."""

    recipe: str  # its name
    encoding: str  # the spec, in its canonical form
    data: str  # the name of its folder
    model: str  # one of DecBERT's, or empty
    # the user's options for fairseq-train that change its result, with their values
    changes: dict[str, str]

    @property
    def folder(self) -> Path:
        """The folder of its checkpoints: ``b_small/wiki/decbert_same-none--lr=2e-4``."""
        name = _escape(f"{self.model}-{self.encoding}" if self.model else self.encoding)
        changes = [_format_change(option, value) for option, value in self.changes.items()]
        if len(",".join(changes)) > _LONGEST:
            digest = hashlib.sha256("\n".join(changes).encode()).hexdigest()[:8]
            changes = [f"{len(changes)}-changes-{digest}"]
        parent = Path("checkpoints", self.recipe, self.data)
        new, old = (parent / separator.join([name, *changes]) for separator in ("--", ","))
        # Older folders have commas, which separate paths in other commands.
        return old if old.exists() and not new.exists() else new


def parse_options(words: Sequence[str]) -> dict[str, str]:
    """Parse options for fairseq-train into their values; of one given twice, the last counts."""
    options: dict[str, str] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            options[name] = value
        elif name:
            options[name] = f"{options[name]} {word}".strip()
    return options


def changed_options(words: Sequence[str]) -> dict[str, str]:
    """Select the options that change a run's result, sorted by name."""
    options = sorted(parse_options(words).items())
    return {name: value for name, value in options if not name.startswith(_SAME_RUN)}


def _format_change(option: str, value: str) -> str:
    name = option.lstrip("-").replace("-", "_")
    return f"{name}={_escape(value.strip('()'))}" if value else name


def _escape(text: str) -> str:
    """Replace the characters that shells and fairseq treat specially."""
    return text.translate(_IN_FILE_NAMES)


_WITH_VALUE_TRUE = {"update_epoch_batch_itr"}  # written as --OPTION True
# fairseq finds out about ranks by itself only where there are GPUs.
_WITH_RANK = ("--no-python", "sh", "-c", 'exec "$0" "$@" --distributed-rank "$RANK"')
_ON_PROCESSORS = {
    "distributed_no_spawn": True,
    "distributed_init_method": "env://",
    "distributed_backend": "gloo",
    "ddp_backend": "legacy_ddp",
}
_END_OPTIONS = ("max_update", "max_epoch", "stop_time_hours", "stop_min_lr", "patience")
_BATCH_OPTIONS = {"--batch-size", "--max-tokens", "--update-freq"}


class RecipeTraining:
    """A recipe with an encoding, trained once for each seed.

    Args:
        recipe: its hyper-parameters.
        encoding: spec of the positions.
        args: the user's options.
        model: one of DecBERT's, or empty.

    Raises:
        UserError: wrong input.
    """

    def __init__(self, recipe: Recipe, encoding: str, args: Namespace, model: str = "") -> None:
        spec, self.data = str(specs.parse(encoding)), find_data(args.data)
        _check_options(recipe, args)
        self.recipe, self.encoding, self.args, self.model = recipe, encoding, args, model
        changes = changed_options(args.after_dashes)
        self.identity = RunIdentity(recipe.name, spec, self.data.name, model, changes)
        self._folder = args.out or self.identity.folder
        self._seeds: Sequence[int] = args.seeds or recipe.seeds

    @property
    def runs(self) -> list[TrainingRun]:
        """The runs, one for each seed."""
        if not self._seeds:
            return [TrainingRun(self, self._folder, None)]
        return [TrainingRun(self, self._folder / f"seed{seed}", seed) for seed in self._seeds]

    @cached_property
    def words(self) -> list[str]:
        """The command of all runs, with the devices of this machine."""
        devices = choose_devices(self.args, self.recipe.name)
        options = {
            **_architecture_options(self.recipe, self.model),
            "position_encoding": self.encoding,
            **self.recipe.all_settings,
            **self.recipe.housekeeping,
            **_batch_options(self.recipe, devices, self.args),
        }
        del options["fp16"]  # the precision is a choice
        if devices.precision == "--cpu" and devices.meeting:
            options.update(_ON_PROCESSORS)
        if self.recipe.warmup_epochs:
            more = self.args.after_dashes
            options.update(_schedule_options(self.recipe, self.data, options, more))
        launcher = [find_command("fairseq-train")]
        if devices.meeting:
            processes = f"--nproc_per_node={devices.gpus}"
            torchrun = [find_command("torchrun"), *devices.meeting, processes]
            launcher = [*torchrun, *(_WITH_RANK if devices.precision == "--cpu" else ()), *launcher]
        return [*launcher, *_format_arguments(self.data, options), devices.precision]


class TrainingRun(NamedTuple):
    """One run of a training, with one seed.

    Attributes:
        training: the recipe, encoding and options.
        folder: its checkpoints and its log.
        seed: the random seed; None for fairseq's default.
    """

    training: RecipeTraining
    folder: Path
    seed: Optional[int]

    @property
    def stage(self) -> Stage:
        """The folder's stamp: it continues with the same run only."""
        return Stage(self.folder, self.training.identity._asdict())

    @property
    def until(self) -> dict[str, str]:
        """The options that end a training, such as ``max_update``, with their values."""
        given = {**self.training.recipe.all_settings}
        for option, value in parse_options(self.training.args.after_dashes).items():
            given[option.lstrip("-").replace("-", "_")] = value
        return {name: str(given[name]) for name in _END_OPTIONS if name in given}

    def is_done(self) -> bool:
        """Whether it has run to its end, with the same options for the end."""
        return (self.stage.outputs or {}).get("until") == self.until

    def updates_done(self) -> int:
        """Count the updates behind its newest whole checkpoint."""
        from fairseq_posenc.checkpoints.recovery import newest_checkpoint  # imports torch

        found = newest_checkpoint(self.folder)
        return found.updates if found else 0

    def begin(self) -> list[str]:
        """Claim the folder and build the command."""
        command = self.command()
        self.stage.claim()
        return command

    def finish(self) -> None:
        """Note in the stamp that it has run to its end."""
        self.stage.finish({"until": self.until})

    def command(self) -> list[str]:
        """Build the whole command, and print what the weights start from.

        A model that starts from a released one never starts from random weights by mistake.

        Raises:
            UserError: see :meth:`choose_start`.
        """
        say(self.choose_start())
        words, args = [*self.training.words, "--save-dir", str(self.folder)], self.training.args
        if self.seed is not None:
            words += ["--seed", str(self.seed)]
        start = ["--finetune-from-model", str(args.init)] if args.init else []
        return [*words, *start, *args.after_dashes]

    def choose_start(self) -> str:
        """Describe what the weights start from.

        Raises:
            UserError: the folder has another run, or there is nothing to start from.
        """
        last, init = self.folder / LAST, self.training.args.init
        requested = parse_options(self.training.args.after_dashes).keys()
        self.stage.refuse_others(last.exists)
        if last.exists():
            if "--restore-file" in requested:
                raise UserError(
                    f"{last} would be lost: leave --restore-file out to go on from it, or choose "
                    "another --out"
                )
            return f"going on from {last}"
        goes = f"checkpoints go to {self.folder}"
        if init:
            if not init.is_file():
                raise UserError(f"--init {init} does not exist")
            return f"starting from the weights of {init}; {goes}"
        if requested & {"--restore-file", "--finetune-from-model"}:
            return f"starting as its options for fairseq-train say; {goes}"
        if self.training.recipe.init.startswith("roberta"):
            raise UserError(
                "this model starts from a released RoBERTa: --init CHECKPOINT, which "
                "'fairseq-posenc swap' makes"
            )
        return f"starting from new weights; {goes}"


def _check_options(recipe: Recipe, args: Namespace) -> None:
    passed = parse_options(args.after_dashes)
    if "--save-dir" in passed:
        raise UserError("name the folder by --out, before the two dashes")
    if "--seed" in passed and (args.seeds or recipe.seeds):
        raise UserError("set the seeds by --seeds 1,2 before the two dashes")
    if args.init and recipe.init == "random":
        raise UserError(f"{recipe.name} starts from new weights: leave --init out")


def _architecture_options(recipe: Recipe, name: str) -> dict[str, Any]:
    """Choose the architecture; some of DecBERT's have no name, only directions."""
    if not name:
        return {"arch": recipe.arch}
    model = recipes.load()["models"][name]
    if "arch" in model or model["directions"] == "both":
        return {"arch": model.get("arch", recipe.arch)}
    return {"arch": recipe.arch, "attention_directions": model["directions"]}


def _batch_options(recipe: Recipe, devices: Devices, args: Namespace) -> dict[str, Any]:
    each, steps = share_batch(recipe, devices, args.per_gpu)
    if _BATCH_OPTIONS & parse_options(args.after_dashes).keys():
        say("the options after the two dashes change the batch")
    size = "batch_size" if recipe.unit == "sequences" else "max_tokens"
    return {size: each, "update_freq": steps, "distributed_world_size": devices.world}


def _schedule_options(
    recipe: Recipe, data: Data, options: Mapping[str, Any], passed: list[str]
) -> dict[str, Any]:
    """Convert a schedule in epochs to updates, which fairseq counts."""
    from fairseq_posenc.workbench.training.train.epochs import updates_per_epoch  # imports fairseq

    updates = updates_per_epoch([*_format_arguments(data, options), *passed])
    assert recipe.warmup_epochs is not None
    rise = recipe.warmup_epochs * updates
    fall = recipe.settings["max_epoch"] * updates - rise
    say(f"an epoch has {updates} updates: warm-up over {rise}, decay over {fall}")
    return {"warmup_steps": rise, "hold_steps": 0, "decay_steps": fall}


def _format_arguments(data: Data, options: Mapping[str, Any]) -> list[str]:
    """Format the arguments of fairseq-train."""
    words = [data.path, "--user-dir", str(USER_DIR)]
    for name, value in options.items():
        words.append(f"--{name.replace('_', '-')}")
        if isinstance(value, list):
            words.append(",".join(map(str, value)))
        elif value is not True or name in _WITH_VALUE_TRUE:
            words.append(str(value))
    return words
