"""Checkpoints of translation models, and the data folder that each was trained on."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Optional

import torch
from fairseq.data import data_utils
from fairseq.tasks import TASK_REGISTRY
from fairseq.tasks.translation import TranslationTask

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.loading.checkpoints import State, data_folder, load_state


class DataBin(NamedTuple):
    """A folder made by ``fairseq-preprocess``, read in one direction.

    Attributes:
        folder: the folder.
        source: language to translate from.
        target: language to translate to.
    """

    folder: Path
    source: str
    target: str

    def dictionary(self, language: str) -> Path:
        """Return the path of a language's dictionary."""
        return self.folder / f"dict.{language}.txt"

    def pieces(self, language: str) -> Path:
        """Return the sentencepiece model that cut a language's text.

        Raises:
            UserError: there is none.
        """
        names = [f"sentencepiece.{language}.model", "sentencepiece.model"]
        for name in names:
            if (self.folder / name).exists():
                return self.folder / name
        raise UserError(
            f"--data {self.folder}: holds neither {names[0]} nor {names[1]}; copy the model "
            "that cut the training text there"
        )

    def raw(self, subset: str, language: str) -> Path:
        """Return where ``preprocess/translation.py`` keeps a subset's untouched text."""
        return self.folder / f"{subset}.raw.{language}"

    def sentences(self, subset: str) -> int:
        """Return the number of sentence pairs of a subset.

        Raises:
            UserError: the folder has no such subset.
        """
        for pair in (f"{self.source}-{self.target}", f"{self.target}-{self.source}"):
            data = data_utils.load_indexed_dataset(f"{self.folder}/{subset}.{pair}.{self.source}")
            if data is not None:
                return len(data)
        raise UserError(
            f"--data {self.folder}: has no split {subset!r} of {self.source} and {self.target}; "
            "fairseq-preprocess makes it with --testpref"
        )


def load_translation(path: Path, what: str = "--checkpoint") -> State:
    """Return the checkpoint of a translation model.

    Args:
        path: the file.
        what: how messages introduce it, as the option that named it.

    Raises:
        UserError: it is no file, is damaged, or was made by another task than translation.
    """
    state = load_state(path, what)
    task = state["cfg"].task.get("_name")
    if not issubclass(TASK_REGISTRY.get(task, object), TranslationTask):
        raise UserError(f"{what} {path}: a model of the task {task!r}, not of translation")
    return state


def data_bin(path: Path, state: State, given: Optional[Path] = None) -> DataBin:
    """Return the data folder of a checkpoint.

    Args:
        path: of the checkpoint, for error messages.
        state: its contents.
        given: another folder with the same dictionaries; by default, the one it was trained on.

    Raises:
        UserError: the folder does not exist or has other dictionaries.
    """
    task = state["cfg"].task
    folder = data_folder(path, state, given)
    languages = task.source_lang, task.target_lang
    found = DataBin(folder, *languages) if all(languages) else any_data_bin(folder)
    _check_dictionaries(path, state["model"], found)
    return found


def any_data_bin(folder: Path) -> DataBin:
    """Return a data folder in the direction that its files' names say.

    Raises:
        UserError: it has no files of a language pair.
    """
    pair = data_utils.infer_language_pair(str(folder)) if folder.is_dir() else (None, None)
    if None in pair:
        raise UserError(f"--data {folder}: has no files of a language pair, such as test.fr-en.fr")
    return DataBin(folder, *pair)


def _check_dictionaries(path: Path, model: dict[str, torch.Tensor], data: DataBin) -> None:
    for stack, language in (("encoder", data.source), ("decoder", data.target)):
        dictionary = data.dictionary(language)
        if not dictionary.exists():
            raise UserError(f"--data {data.folder}: holds no {dictionary.name}")
        embeddings = model.get(f"{stack}.embed_tokens.weight")
        size = len(TranslationTask.load_dictionary(str(dictionary)))
        if embeddings is not None and embeddings.size(0) != size:
            raise UserError(
                f"--data {data.folder}: {dictionary.name} has {size} symbols, but {path} was "
                f"trained with {embeddings.size(0)}; name the folder it was trained on"
            )
