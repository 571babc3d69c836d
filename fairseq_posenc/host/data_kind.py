"""Which kind of text a data-bin has: pairs of sentences, or running text."""

from __future__ import annotations

from pathlib import Path

from fairseq_posenc.errors import UserError

_OF_QUESTIONS = '"windows":'  # in the manifest of SQuAD's data-bins alone


def check_kind(folder: Path, pairs: bool, user: str) -> None:
    """Check whether a folder has pairs of sentences, or running text.

    ``pairs`` says whether the ``user``, named in messages, needs pairs.

    Raises:
        UserError: it has the other, or neither.
    """
    text, languages = folder / "dict.txt", sorted(folder.glob("dict.*.txt"))
    names = ", ".join(path.name for path in languages)
    if pairs and not languages:
        has = "dict.txt, data of language models" if text.exists() else "no dictionary"
        raise UserError(f"{folder} has {has}: {user} reads pairs of sentences, with dict.LANG.txt")
    if not pairs and not text.exists():
        has = f"{names}, data of a translation" if languages else "no dict.txt: no data-bin"
        raise UserError(f"{folder} has {has}: {user} reads running text, with dict.txt")
    manifest = folder / "manifest.json"
    if not pairs and manifest.is_file() and _OF_QUESTIONS in manifest.read_text("utf-8"):
        raise UserError(f"{folder} has the questions of SQuAD: {user} reads running text")
