"""Reads parallel text: lines of two files with the same index are translations of each other.

Lines keep their number in their file, so that errors can name it, until checked splits are joined.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fairseq_posenc.errors import UserError
from fairseq_posenc.folders import checksum
from fairseq_posenc.tokens.files import decode_text, read_bytes

_REFUSED_BYTES = {b"\0": "a NUL byte", b"\r": "a carriage return inside a line"}


class NumberedLines(NamedTuple):
    """Lines in one language."""

    origin: str  # the file as it was given, for messages
    lines: list[str]  # without line ends
    numbers: Sequence[int]  # of the lines in the file, from 1; IWSLT's files leave some out

    def locate(self, index: int) -> str:
        """Name the file and line number of a line, for messages."""
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
    r"""Decode a UTF-8 file into lines, which end with ``\n`` or ``\r\n``.

    Raises:
        UserError: the file is empty, not UTF-8, or has a NUL byte or a carriage return in a line.
    """
    if not content.strip():
        raise UserError(f"{origin}: the file is empty; give one with text in it")
    text = decode_text(content.replace(b"\r\n", b"\n"), origin, _REFUSED_BYTES)
    lines = text.removesuffix("\n").split("\n")
    return NumberedLines(origin, lines, range(1, len(lines) + 1))


def check_split(split: ParallelSplit, refuse_empty: bool) -> ParallelSplit:
    """Check that both sides of a split have the same number of lines; return the split.

    Empty lines are refused in validation and test sets: training drops such pairs later.

    Raises:
        UserError: a line has no partner or is empty.
    """
    source, target = split.sides
    shared = min(len(source.lines), len(target.lines))
    for side in split.sides:
        if len(side.lines) > shared:
            raise UserError(
                f"{side.locate(shared)}: no line of the other side belongs to it, because "
                f"{source.origin} has {len(source.lines):,} lines of text and {target.origin} "
                f"{len(target.lines):,}; give files that are translations line by line"
            )
        for index, line in enumerate(side.lines if refuse_empty else []):
            if not line.strip():
                raise UserError(
                    f"{side.locate(index)}: empty; lines are never left out of validation and test "
                    "sets, so remove the pair from both files, or fill it in"
                )
    return split


def read_files(
    train: str, valid: Sequence[str], test: Sequence[str], languages: tuple[str, str]
) -> ParallelCorpus:
    """Read a corpus of text files, one for each language, perhaps compressed with gzip.

    A set is named by the path of its files before ``.LANGUAGE`` or ``.LANGUAGE.gz``.

    Raises:
        UserError: a file is missing, is not UTF-8 text, or does not fit the other language.
    """
    inputs: dict[str, str] = {}

    def read(prefix: str, refuse_empty: bool = True) -> ParallelSplit:
        sides = []
        for language in languages:
            path = _find_side(prefix, language)
            # Sets in two folders may have the same name.
            inputs[str(path) if path.name in inputs else path.name] = checksum(path)
            sides.append(decode(read_bytes(path), str(path)))
        return check_split(ParallelSplit(Path(prefix).name, *sides), refuse_empty)

    return ParallelCorpus(
        train=read(train, refuse_empty=False),
        valid=[read(prefix) for prefix in valid],
        test=[read(prefix) for prefix in test],
        inputs=inputs,
        left_out={},
    )


def _find_side(prefix: str, language: str) -> Path:
    """Find the file in one language, plain or compressed."""
    paths = [Path(f"{prefix}.{language}"), Path(f"{prefix}.{language}.gz")]
    found = [path for path in paths if path.exists()]
    if not found:
        raise UserError(
            f"neither {paths[0]} nor {paths[1]} exists; check the name and the language"
        )
    if len(found) > 1:
        raise UserError(f"{paths[0]} and {paths[1]} both exist; remove the one that is not meant")
    return found[0]
