"""Reads parallel text; lines keep their numbers, so that errors can name the place."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.running.files import checksum
from fairseq_posenc.workbench.tokens.files import decode_text, read_bytes

_REFUSED = {b"\0": "a NUL byte", b"\r": "a carriage return inside a line"}


class NumberedLines(NamedTuple):
    """Lines in one language."""

    origin: str  # name of the file, for messages
    lines: list[str]  # without line ends
    numbers: Sequence[int]  # number of each line in the file, from 1

    def where(self, index: int) -> str:
        """Describe the place of a line."""
        return f"{self.origin}, line {self.numbers[index]}"


class ParallelSplit(NamedTuple):
    """A part of a corpus in two languages; lines with the same index are translations."""

    name: str
    source: NumberedLines
    target: NumberedLines

    @property
    def sides(self) -> tuple[NumberedLines, NumberedLines]:
        """Both sides, the source first."""
        return self.source, self.target


class ParallelCorpus(NamedTuple):
    """A corpus: text for training, validation and test."""

    train: ParallelSplit  # training pairs
    valid: list[ParallelSplit]  # one or several validation sets
    test: list[ParallelSplit]  # one or several test sets
    inputs: dict[str, str]  # SHA-256 of each file that was read, by name
    left_out: dict[str, dict[str, int]]  # language -> tag -> number of training lines left out


def decode(content: bytes, origin: str) -> NumberedLines:
    """Decode a UTF-8 file into lines, which end with a line feed or a carriage return and one.

    Raises:
        UserError: the file is empty, not UTF-8, or has a NUL byte or a carriage return in a line.
    """
    if not content.strip():
        raise UserError(f"{origin}: the file is empty; give one with text in it")
    text = decode_text(content.replace(b"\r\n", b"\n"), origin, _REFUSED)
    lines = text.removesuffix("\n").split("\n")
    return NumberedLines(origin, lines, range(1, len(lines) + 1))


def check_split(split: ParallelSplit, keep_all: bool) -> ParallelSplit:
    """Check that both sides of a split have the same number of lines; return the split.

    Args:
        split: the split.
        keep_all: whether to refuse empty lines, because no pair may be dropped later.

    Raises:
        UserError: a line has no partner or is empty.
    """
    source, target = split.source, split.target
    shared = min(len(source.lines), len(target.lines))
    for side in split.sides:
        if len(side.lines) > shared:
            raise UserError(
                f"{side.where(shared)}: no line of the other side belongs to it, because "
                f"{source.origin} has {len(source.lines):,} lines of text and {target.origin} "
                f"{len(target.lines):,}; give files that are translations line by line"
            )
        for index, line in enumerate(side.lines if keep_all else []):
            if not line.strip():
                raise UserError(
                    f"{side.where(index)}: empty; lines are never left out of validation and test "
                    "sets, so remove the pair from both files, or fill it in"
                )
    return split


def join_splits(name: str, splits: Sequence[ParallelSplit]) -> ParallelSplit:
    """Concatenate several splits that were checked."""
    if len(splits) == 1:
        return splits[0]

    def side(texts: Sequence[NumberedLines]) -> NumberedLines:
        lines = [line for text in texts for line in text.lines]
        return NumberedLines(
            " and ".join(text.origin for text in texts), lines, range(1, len(lines) + 1)
        )

    return ParallelSplit(name, side([s.source for s in splits]), side([s.target for s in splits]))


def read_files(
    train: str, valid: Sequence[str], test: Sequence[str], languages: tuple[str, str]
) -> ParallelCorpus:
    """Read a corpus of text files, one for each language, perhaps compressed with gzip.

    A set is named by the path of its files before ``.LANGUAGE`` or ``.LANGUAGE.gz``.

    Raises:
        UserError: a file is missing, is not UTF-8 text, or does not fit the other language.
    """
    inputs: dict[str, str] = {}

    def split(prefix: str, keep_all: bool = True) -> ParallelSplit:
        source, target = (_read_side(prefix, language, inputs) for language in languages)
        return check_split(ParallelSplit(Path(prefix).name, source, target), keep_all)

    return ParallelCorpus(
        split(train, False), [*map(split, valid)], [*map(split, test)], inputs, {}
    )


def _read_side(prefix: str, language: str, inputs: dict[str, str]) -> NumberedLines:
    """Read a file in one language, plain or compressed; add its checksum to ``inputs``."""
    plain = Path(f"{prefix}.{language}")
    packed = Path(f"{prefix}.{language}.gz")
    existing = [path for path in (plain, packed) if path.exists()]
    if len(existing) > 1:
        raise UserError(f"{plain} and {packed} both exist; remove the one that is not meant")
    if not existing:
        raise UserError(f"there is neither {plain} nor {packed}; check the name and the language")
    (path,) = existing
    content = read_bytes(path)
    inputs[str(path) if path.name in inputs else path.name] = checksum(path)
    return decode(content, str(path))
