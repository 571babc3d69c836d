"""Loads the dictionaries of a trained model, checked against its checkpoint, and its tokenizer."""

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple, Optional

from fairseq import tasks as fairseq_tasks
from fairseq.data import Dictionary, data_utils
from fairseq.dataclass.utils import overwrite_args_by_name
from fairseq.tasks import TASK_REGISTRY
from fairseq.tasks.translation import TranslationTask
from fairseq.utils import split_paths
from torch import Tensor

from fairseq_posenc.checkpoints.dictionary import DICTIONARY, fingerprint, load_dictionary
from fairseq_posenc.errors import UserError
from fairseq_posenc.identity import Identity, is_identity
from fairseq_posenc.tokens.gpt2 import GPT2
from fairseq_posenc.tokens.pieces import PieceEncoder, Pieces
from fairseq_posenc.tokens.tokenizer import ENCODER_JSON, MERGES, PIECES, Tokenizer
from fairseq_posenc.workbench.loading.checkpoints import State

_ADVICE = "--data must have the dictionary that the model was trained with"


class TrainedDictionary(NamedTuple):
    """What a checkpoint records about a dictionary of its training."""

    checkpoint: Path
    size: Optional[int]  # number of symbols; None without token embeddings
    # hash of its symbols; None in checkpoints of fairseq and of earlier versions
    fingerprint: Optional[str]
    file: Optional[Path]  # the file that the training read, which may be gone; None if unknown

    def check(self, file: Path, dictionary: Dictionary, advice: str) -> None:
        """Refuse a dictionary that differs from that of the training.

        Args:
            file: file of the dictionary.
            dictionary: its content.
            advice: ends the message.
        """
        masked = "<mask>" in dictionary  # some tasks add it after loading
        if self.size is not None and self.size != len(dictionary):
            raise UserError(
                f"{file} has {len(dictionary):,} symbols{' with <mask>' if masked else ''}, but "
                f"{self.checkpoint} has {self.size:,}; {advice}"
            )
        trained = self.fingerprint  # else that of the training's file, if it is still in its place
        if trained is None and self.file and self.file.is_file():
            trained = fingerprint(load_dictionary(self.file, mask=masked))
        if trained is not None and trained != fingerprint(dictionary):
            raise UserError(
                f"{file} has other symbols, or in another order, than the dictionary that "
                f"{self.checkpoint} was trained with; {advice}"
            )


class OpenTask(NamedTuple):
    """The task of a trained model, set up on its data."""

    task: Any  # fairseq's task
    settings: Any  # configuration of the training, with the data and languages of the task
    data: Path  # the data-bin, with the dictionaries and the tokenizer's files
    dictionaries: dict[str, Dictionary]  # file name -> dictionary; the source's is the first


def translates(settings: Any) -> bool:
    """Check whether the settings of a task are those of a translation."""
    return issubclass(TASK_REGISTRY.get(settings.get("_name"), object), TranslationTask)


def open_task(path: Path, state: State, data: Optional[Path] = None) -> OpenTask:
    """Set up the task of a checkpoint.

    Args:
        path: the checkpoint.
        state: its content.
        data: folder with the dictionaries; by default the one of the training.

    Raises:
        UserError: the folder or a dictionary is missing, or is not that of the training.
    """
    settings = deepcopy(state["cfg"])
    trained_folder = Path(split_paths(str(settings.task.get("data")))[0])  # its first shard
    folder = data or trained_folder
    if not folder.is_dir():
        why = "" if data else f": {path} was trained on it; name its new place with --data"
        raise UserError(f"--data {folder}: no such folder{why}")
    if translates(settings.task) and not (settings.task.source_lang and settings.task.target_lang):
        pair = data_utils.infer_language_pair(str(folder))
        if None in pair:
            raise UserError(
                f"--data {folder}: has no files of a language pair, such as test.fr-en.fr"
            )
        settings.task.source_lang, settings.task.target_lang = pair
    files = _name_dictionaries(settings.task, folder)
    for name in files:
        if not (folder / name).is_file():
            raise UserError(
                f"--data {folder}: holds no {name}; name the folder that {path} was trained on, "
                "or a copy of its dictionaries and tokenizer"
            )
    # The training may have had --init-positions. Here, it would replace positions that the
    # checkpoint lacks by new ones, and so hide a wrong spec or a damaged file.
    overwrite_args_by_name(settings, {"data": str(folder), "init_positions": False})
    task = fairseq_tasks.setup_task(settings.task)
    # `files` has the source's first. If it is alone, `zip` leaves out the target's dictionary: the
    # same one, or one of labels.
    dictionaries = dict(zip(files, (task.source_dictionary, task.target_dictionary)))
    trained = read_trained_dictionaries(state["model"], path, [trained_folder / x for x in files])
    for name, dictionary in zip(files, trained):
        dictionary.check(folder / name, dictionaries[name], _ADVICE)
    return OpenTask(task, settings, folder, dictionaries)


def read_trained_dictionaries(
    weights: dict[str, Tensor], path: Path, files: Sequence[Optional[Path]]
) -> list[TrainedDictionary]:
    """Read what a checkpoint records about its dictionaries, the source's first.

    Args:
        weights: its weights, by name.
        path: the checkpoint.
        files: the files that the training read: one, or the encoder's and the decoder's.
    """
    found = []
    prefixes = ("encoder.", "decoder.") if len(files) > 1 else ("",)
    for prefix, file in zip(prefixes, files):
        of_stack = {name: weight for name, weight in weights.items() if name.startswith(prefix)}
        # A row for each symbol.
        tables = (x for name, x in of_stack.items() if name.endswith("embed_tokens.weight"))
        size = next((table.size(0) for table in tables), None)
        found.append(TrainedDictionary(path, size, _read_fingerprint(of_stack), file))
    return found


def _read_fingerprint(weights: dict[str, Tensor]) -> Optional[str]:
    """Read the hash of the dictionary from a tensor in which our stacks keep their settings."""
    for name in filter(is_identity, weights):
        return Identity.from_tensor(weights[name]).weight_settings.dictionary
    return None


def _name_dictionaries(settings: Any, folder: Path) -> list[str]:
    """Name the files of a task's dictionaries, the source's first."""
    if translates(settings):
        return [f"dict.{language}.txt" for language in (settings.source_lang, settings.target_lang)]
    is_glue = (folder / "input0").is_dir()  # `input0` has the first sentence of each example
    return [f"input0/{DICTIONARY}" if is_glue else DICTIONARY]


def load_tokenizer(folder: Path, dictionary: Dictionary) -> Tokenizer:
    """Load the tokenizer whose files are in a folder; refuse a folder without them."""
    if (folder / PIECES).exists():
        return PieceEncoder(Pieces(folder / PIECES), dictionary)
    if (folder / ENCODER_JSON).exists():
        return GPT2(folder / ENCODER_JSON, folder / MERGES, dictionary)
    raise UserError(f"{folder}: holds neither {PIECES} nor {ENCODER_JSON} and {MERGES}")
