"""Opens checkpoints of translation models, with their data folders, and averages checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

import torch
from fairseq import checkpoint_utils
from torch import Tensor

from fairseq_posenc.checkpoints.safe_loading import open_whole
from fairseq_posenc.errors import UserError
from fairseq_posenc.folders import list_differences
from fairseq_posenc.identity import Identity, is_identity
from fairseq_posenc.workbench.loading.checkpoints import State, load_state, write_state
from fairseq_posenc.workbench.loading.dictionaries import OpenTask, translates
from fairseq_posenc.workbench.loading.open_model import OpenModel, open_model


class ParallelDataBin(NamedTuple):
    """A folder made by ``fairseq-preprocess``, and the direction of translation."""

    folder: Path
    source: str  # language to translate from
    target: str  # language to translate to

    @classmethod
    def from_opened(cls, opened: Union[OpenTask, OpenModel]) -> ParallelDataBin:
        """Name the folder and languages that a task or model was opened with."""
        settings = opened.task.cfg
        return cls(opened.data, settings.source_lang, settings.target_lang)

    def find_raw_text(self, split: str, language: str, option: str) -> Path:
        """Find the raw text of a split; ``option`` is the one that names another.

        Raises:
            UserError: the folder has no such file.
        """
        path = self.folder / f"{split}.raw.{language}"
        if not path.is_file():
            raise UserError(f"name the text with {option}: {self.folder} has no {path.name}")
        return path

    def find_pieces(self, language: str) -> Path:
        """Find the sentencepiece model of a language.

        Raises:
            UserError: the folder has no such model.
        """
        names = [f"sentencepiece.{language}.model", "sentencepiece.model"]
        for name in names:
            if (self.folder / name).exists():
                return self.folder / name
        raise UserError(
            f"--data {self.folder}: holds neither {names[0]} nor {names[1]}; copy the tokenizer "
            "of the training text there"
        )


def load_translation(path: Path, option: str = "--checkpoint") -> State:
    """Load the checkpoint of a translation model; messages begin with the ``option`` that named it.

    Raises:
        UserError: the path is not a file, the file is damaged, or its model does not translate.
    """
    state = load_state(path, option)
    task = state["cfg"].task
    if not translates(task):
        name = task.get("_name")
        raise UserError(f"{option} {path}: is a model for the task {name!r}, not for translation")
    return state


def open_ensemble(paths: Iterable[Path], data: Optional[Path] = None) -> list[OpenModel]:
    """Open models with the data folder of the first, unless ``data`` names another.

    Raises:
        UserError: ``paths`` is empty, a model cannot be opened, or their languages differ.
    """
    opened: list[OpenModel] = []
    for path in paths:
        folder = opened[0].data if opened else data
        opened.append(open_model(path, folder, state=load_translation(path)))
        directions = [f"{x.task.cfg.source_lang}-{x.task.cfg.target_lang}" for x in opened]
        if directions[-1] != directions[0]:
            raise UserError(
                f"--checkpoint {path}: translates {directions[-1]}, but {opened[0].path} "
                f"translates {directions[0]}"
            )
    if not opened:
        raise UserError("no checkpoint to load")
    return opened


def find_last_checkpoints(folder: Path, count: int) -> list[Path]:
    """Find the checkpoints of a folder's last epochs, the newest first.

    Raises:
        UserError: there are fewer than ``count``.
    """
    if not folder.is_dir():
        raise UserError(f"--average {count}: {folder} is not a folder of checkpoints")
    paths = checkpoint_utils.checkpoint_paths(str(folder))
    if not 1 <= count <= len(paths):
        raise UserError(
            f"--average {count}: {folder} holds {len(paths)} checkpoints of whole epochs "
            "(checkpoint1.pt and so on)"
        )
    return [Path(path) for path in paths[:count]]


def average_checkpoints(paths: Sequence[Path], target: Path) -> None:
    """Write a checkpoint with the averaged parameters of several.

    Like fairseq's ``scripts/average_checkpoints.py``, which its package does not install. Sums are
    accumulated in float32 or wider, and each mean is cast back to the dtype of its parameter. The
    settings are those of the first checkpoint. The optimizer state is dropped because it does not
    belong to the averaged parameters.

    Raises:
        UserError: a file is not a checkpoint, or the models differ in encoding or shapes.
    """
    first = load_translation(paths[0])["model"]
    sums: dict[str, Tensor] = {}
    for path in paths:  # files are mapped into memory, so to open the first again costs little
        model = load_translation(path)["model"]
        if differences := list_differences(_describe(first), _describe(model)):
            raise UserError(
                f"{paths[0]} and {path} are different models: {len(differences)} differences, such "
                f"as {differences[0]}"
            )
        for name, value in model.items():
            if not is_identity(name):  # an identity describes the weights, and is kept as it is
                wide = torch.promote_types(value.dtype, torch.float32)
                sums[name] = sums.get(name, 0) + value.to(wide)
    means = {
        name: (sums[name] / len(paths)).to(value.dtype) if name in sums else value
        for name, value in first.items()
    }
    # The first file's settings as they are stored; those of `load_translation` are upgraded.
    state = open_whole(paths[0])
    write_state({**state, "model": means, "last_optimizer_state": None}, target)


def _describe(model: dict[str, Tensor]) -> dict[str, Any]:
    """Describe the weights by name: what a stack was trained with, and the shapes of parameters."""
    described: dict[str, Any] = {}
    for name, value in model.items():
        if is_identity(name):
            identity = Identity.from_tensor(value)
            settings = identity.weight_settings._asdict()
            described[name] = {"positions": identity.describe(), **settings}
        else:
            described[name] = tuple(value.shape)
    return described
