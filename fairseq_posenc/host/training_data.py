"""Checks a command's data before it loads them: shards, lengths of files, ends of documents."""

import struct
from pathlib import Path
from typing import Any

from fairseq import utils
from fairseq.data import data_utils
from fairseq.tasks.language_modeling import LanguageModelingTask
from fairseq.tasks.masked_lm import MaskedLMTask

from fairseq_posenc.errors import UserError
from fairseq_posenc.specs import Spec
from fairseq_posenc.transformer.options import read_task_options

_HEADER = "<9sQBQ"  # of the format mmap, fairseq's default: magic, version, type, sentences
_MAGIC = b"MMIDIDX\0\0"
_TOKEN_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 8: 2, 9: 4, 10: 8}  # by fairseq's code of their type


def check_shards(data: str, split: str) -> None:
    """Check that all folders of a training have its split, and the same dictionary.

    fairseq has opened the first of them, but opens a shard only when its epoch begins, perhaps days
    after the start.

    Args:
        data: the folders, joined by colons.
        split: the value of ``--train-subset``.

    Raises:
        UserError: a folder or its split is missing, or a dictionary differs from the first one.
    """
    first, *shards = map(Path, utils.split_paths(data))
    for folder in shards:
        if not folder.is_dir():
            raise UserError(
                f"there is no folder {folder}, one of {len(shards) + 1} shards: correct its name, "
                "or make it"
            )
        names = {path.name for path in folder.iterdir()}
        if split not in names and not any(name.startswith(f"{split}.") for name in names):
            splits = sorted({n.partition(".")[0] for n in names if n.endswith((".idx", ".bin"))})
            raise UserError(
                f"{folder} has no split {split!r} (--train-subset), but "
                f"{', '.join(splits) or 'none at all'}"
            )
        for path in sorted(folder.glob("dict*.txt")):
            other = first / path.name
            if not other.exists() or path.read_bytes() != other.read_bytes():
                raise UserError(
                    f"{path} is not the dictionary of {first}, which fairseq uses for all "
                    "shards: ids would mean other tokens; preprocess the shards with one dictionary"
                )


def check_data_bins(task: Any) -> None:
    """Refuse a task whose data-bins are damaged; a task may be set up without any."""
    data = getattr(read_task_options(task), "data", None)
    for folder in utils.split_paths(data or ""):
        for index in Path(folder).rglob("*.idx") if folder else ():
            check_data_bin(index)


def check_data_bin(index: Path) -> None:
    """Refuse a split whose files do not have the lengths that its index says.

    fairseq maps them into memory and trusts the index: a file that was not written to its end
    causes a crash, or wrong tokens. Indices of other formats than fairseq's default are not
    checked.
    """
    data = index.with_suffix(".bin")
    for path in (index, data):
        if path.exists() and not path.is_file():
            raise UserError(f"{path}: is not a file; make the data-bin again")
    if not (index.exists() and data.exists()):
        return  # fairseq reports a missing split
    size = index.stat().st_size
    header_size = struct.calcsize(_HEADER)
    with open(index, "rb") as file:
        header = file.read(header_size)
        if not header.startswith(_MAGIC[:8]):
            return
        if len(header) < header_size:
            raise _damaged(index, "it was not written to its end")
        _, _, code, count = struct.unpack(_HEADER, header)
        expected = header_size + 12 * count  # a length of 4 bytes, and a place of 8
        if size != expected or code not in _TOKEN_BYTES:
            raise _damaged(index, f"{size:,} bytes, not the {expected:,} of {count:,} sentences")
        if not count:
            raise UserError(f"{data} is empty: the split has no sentences; make it of longer text")
        file.seek(header_size + 4 * (count - 1))
        (length,) = struct.unpack("<i", file.read(4))
        file.seek(size - 8)
        (begin,) = struct.unpack("<q", file.read(8))
    end = begin + length * _TOKEN_BYTES[code]
    if data.stat().st_size != end:
        found = f"{data.name} has {data.stat().st_size:,} bytes, and its sentences have {end:,}"
        raise _damaged(index, found)


def _damaged(index: Path, reason: str) -> UserError:
    return UserError(f"{index} is damaged: {reason}; make the data-bin again")


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
