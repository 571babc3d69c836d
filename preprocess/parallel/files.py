"""Parallel text in plain files, one for each language, compressed with gzip or not."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from fairseq_posenc.errors import UserError
from fairseq_posenc.running.files import checksum
from fairseq_posenc.tokens.files import DAMAGED, contents
from parallel.texts import Corpus, Split, Text, check, decode


def read_bytes(path: Path) -> bytes:
    """Return a file's content.

    Raises:
        UserError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; name a file that can be read") from None


def read_files(
    train: str, valid: Sequence[str], test: Sequence[str], languages: tuple[str, str]
) -> Corpus:
    """Read a corpus of plain files.

    Args:
        train: what the names of the two files to train on begin with, before ``.LANGUAGE`` or
            ``.LANGUAGE.gz``.
        valid: the same for the validation sets.
        test: the same for the test sets.
        languages: source and target.

    Raises:
        UserError: a file is missing, is not UTF-8 text, or does not fit the other side.
    """
    inputs: dict[str, str] = {}

    def split(prefix: str, keep_all: bool = True) -> Split:
        source, target = (_read_side(prefix, language, inputs) for language in languages)
        return check(Split(Path(prefix).name, source, target), keep_all)

    return Corpus(split(train, False), [*map(split, valid)], [*map(split, test)], inputs, {})


def _read_side(prefix: str, language: str, inputs: dict[str, str]) -> Text:
    plain, packed = Path(f"{prefix}.{language}"), Path(f"{prefix}.{language}.gz")
    if plain.exists() and packed.exists():
        raise UserError(f"{plain} and {packed} both exist; remove the one that is not meant")
    if not plain.exists() and not packed.exists():
        raise UserError(f"there is neither {plain} nor {packed}; check the name and the language")
    path = plain if plain.exists() else packed
    content = read_bytes(path)
    inputs[str(path) if path.name in inputs else path.name] = checksum(path)
    if path is packed:
        try:
            content = contents(path, io.BytesIO(content)).read()
        except (OSError, *DAMAGED) as error:
            raise UserError(f"{path}: not a whole gzip file ({error}); fetch it again") from None
    return decode(content, str(path))
