"""Opens checkpoints of translation models, with the data folders that they were trained on."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, Optional, Union

from fairseq.data import data_utils

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.loading.checkpoints import State, load_state
from fairseq_posenc.workbench.loading.dictionaries import OpenTask, translates
from fairseq_posenc.workbench.loading.open_model import OpenModel, open_model


class ParallelDataBin(NamedTuple):
    """A folder made by ``fairseq-preprocess``, and the direction of translation."""

    folder: Path
    source: str  # language to translate from
    target: str  # language to translate to

    @property
    def direction(self) -> str:
        """The languages, as in ``fr-en``."""
        return f"{self.source}-{self.target}"

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

    def count_sentences(self, subset: str) -> int:
        """Count the sentence pairs of a subset.

        Raises:
            UserError: the folder has no such subset.
        """
        for pair in (self.direction, f"{self.target}-{self.source}"):
            data = data_utils.load_indexed_dataset(f"{self.folder}/{subset}.{pair}.{self.source}")
            if data is not None:
                return len(data)
        raise UserError(
            f"--data {self.folder}: has no split {subset!r} of {self.source} and {self.target}; "
            "fairseq-preprocess makes it with --testpref"
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


def find_data_bin(opened: Union[OpenTask, OpenModel]) -> ParallelDataBin:
    """Build the data-bin that a task or model was opened with."""
    return ParallelDataBin(opened.data, opened.task.cfg.source_lang, opened.task.cfg.target_lang)


def open_ensemble(paths: Iterable[Path], data: Optional[Path] = None) -> list[OpenModel]:
    """Open models with the data folder of the first, unless ``data`` names another.

    Raises:
        UserError: there is no path, a model cannot be opened, or their languages differ.
    """
    opened: list[OpenModel] = []
    for path in paths:
        folder = opened[0].data if opened else data
        opened.append(open_model(path, folder, state=load_translation(path)))
        first, last = find_data_bin(opened[0]).direction, find_data_bin(opened[-1]).direction
        if first != last:
            raise UserError(
                f"--checkpoint {path}: translates {last}, but {opened[0].path} translates {first}"
            )
    if not opened:
        raise UserError("no checkpoint to load")
    return opened
