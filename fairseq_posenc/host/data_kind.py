"""Checks whether a data-bin has pairs of sentences or running text, as a task needs it."""

from pathlib import Path

from fairseq_posenc.checkpoints.dictionary import DICTIONARY, MANIFEST
from fairseq_posenc.errors import UserError

_SQUAD_MARK = '"windows":'  # only in the manifest of SQuAD's data-bins


def check_kind(folder: Path, pairs: bool, user: str) -> None:
    """Check that a folder has the kind of text that is needed.

    Args:
        folder: the data-bin.
        pairs: True for pairs of sentences, False for running text.
        user: who needs it, for the message, such as ``--task translation``.

    Raises:
        UserError: the folder has the other kind, or no data.
    """
    text, languages = folder / DICTIONARY, sorted(folder.glob("dict.*.txt"))
    names = ", ".join(path.name for path in languages)
    if pairs and not languages:
        has = "dict.txt, data of language models" if text.exists() else "no dictionary"
        raise UserError(f"{folder} has {has}: {user} reads pairs of sentences, with dict.LANG.txt")
    if not pairs and not text.exists():
        has = f"{names}, translation data" if languages else "no dict.txt: no data-bin"
        raise UserError(f"{folder} has {has}: {user} reads running text, with dict.txt")
    manifest = folder / MANIFEST
    if not pairs and manifest.is_file() and _SQUAD_MARK in manifest.read_text("utf-8"):
        raise UserError(f"{folder} has the questions of SQuAD: {user} reads running text")
