"""Checks a command's data before it loads them: folders, splits, dictionaries, ends of documents.

fairseq opens a shard only when its epoch begins, perhaps days after the start.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fairseq import utils
from fairseq.data import data_utils
from fairseq.tasks.language_modeling import LanguageModelingTask
from fairseq.tasks.masked_lm import MaskedLMTask
from omegaconf import OmegaConf

from fairseq_posenc.checkpoints.dictionary import check_text_kind
from fairseq_posenc.errors import UserError
from fairseq_posenc.specs import Spec
from fairseq_posenc.transformer.options import read_task_options

_TASKS_ON_TEXT = ("masked_lm", "language_modeling")  # they read dict.txt
_TASKS_ON_PAIRS = ("translation",)  # they read dict.LANGUAGE.txt


def check_data(settings: Any, command: str) -> None:
    """Check that the data of a command exist, are complete, and suit its task.

    Args:
        settings: fairseq's configuration.
        command: ``train``, ``generate``, ``interactive`` or ``eval_lm``.

    Raises:
        UserError: data are missing, or do not suit the task.
    """
    task = settings.task
    if OmegaConf.is_config(task) and OmegaConf.is_missing(task, "data"):
        raise UserError("no data: name the data folder (fairseq-hydra-train: task.data=FOLDER)")
    name = getattr(task, "_name", None)
    data = getattr(task, "data", None)
    if not data or not isinstance(data, str) or "://" in data:  # remote data cannot be checked
        return
    folders = [Path(part) for part in utils.split_paths(data)]
    opened_folders = folders if command == "train" else folders[:1]
    for folder in opened_folders:
        if not folder.is_dir():
            which = f", one of {len(folders)} shards" if len(folders) > 1 else ""
            raise UserError(f"there is no folder {folder}{which}: correct its name, or make it")
    if name in _TASKS_ON_TEXT or name in _TASKS_ON_PAIRS:
        check_text_kind(folders[0], pairs=name in _TASKS_ON_PAIRS, reader=f"--task {name}")
        _check_splits(folders, settings, command)


def _check_splits(folders: Sequence[Path], settings: Any, command: str) -> None:
    """Check that all splits exist, and that the shards have the same dictionary."""
    dataset = settings.dataset
    if command in ("generate", "eval_lm"):
        _check_split(folders[0], dataset.gen_subset, "--gen-subset")
    if command != "train":
        return
    if not dataset.disable_validation:
        for subset in dataset.valid_subset.split(","):
            _check_split(folders[0], subset, "--valid-subset")
    for folder in folders:
        _check_split(folder, dataset.train_subset, "--train-subset")
        for path in sorted(folder.glob("dict*.txt")):
            first = folders[0] / path.name
            if not first.exists() or path.read_bytes() != first.read_bytes():
                raise UserError(
                    f"{path} is not the dictionary of {folders[0]}, which fairseq uses for all "
                    "shards: ids would mean other tokens; preprocess the shards with one dictionary"
                )


def _check_split(folder: Path, split: str, option: str) -> None:
    """Check that a folder has a split: a file ``SPLIT``, or ``SPLIT.bin`` and the like."""
    names = {path.name for path in folder.iterdir()}
    if split not in names and not any(name.startswith(f"{split}.") for name in names):
        splits = sorted({n.partition(".")[0] for n in names if n.endswith((".idx", ".bin"))})
        raise UserError(
            f"{folder} has no split {split!r} ({option}), but {', '.join(splits) or 'none at all'}"
        )


def check_document_ends(spec: Spec, task: Any) -> None:
    """Refuse to train with ``documents`` on text in which the ends of documents are not marked.

    Every ``</s>`` ends a document, or with ``end=empty`` every empty line. Only language models are
    checked, as only their samples are blocks of running text.

    Raises:
        UserError: without ``--include-target-tokens`` a masked LM gets ``<mask>`` in place of some
            ends; the lines of the training text do not end with ``</s>``; or ``end=empty`` is set
            and no line is empty.
    """
    documents = (dict(item.options) for item in spec.whole_stack if item.name == "documents")
    ends = [options.get("end", "eos") for options in documents]
    if not ends or not isinstance(task, (LanguageModelingTask, MaskedLMTask)):
        return
    settings = read_task_options(task)
    if isinstance(task, MaskedLMTask) and not settings.include_target_tokens:
        raise UserError(
            "documents: a masked </s> would not end its document; add --include-target-tokens"
        )
    train = Path(utils.split_paths(settings.data or "")[0]) / "train"
    # By default fairseq maps the text into memory, and does not read it.
    lines = data_utils.load_indexed_dataset(str(train), task.source_dictionary)
    if not lines:
        return  # no training text, so the command only evaluates other splits
    # fairseq-preprocess ends either all lines with </s> or none, so the first line is enough.
    if lines[0][-1] != task.source_dictionary.eos():
        raise UserError(f"documents: the lines of {train} do not end with </s>")
    if "empty" in ends and not (lines.sizes == 1).any():  # only </s>
        raise UserError(
            f"documents(end=empty): no line of {train} is empty, so no document ends; put an "
            "empty line after each document, or use documents, which ends one at each line"
        )
