"""Parallel text as lines that know where they stand, so that an error can say where it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fairseq_posenc.errors import UserError
from fairseq_posenc.tokens import lines

_REFUSED = {b"\0": "a NUL byte", b"\r": "a carriage return inside a line"}


class Text(NamedTuple):
    """Lines in one language.

    Attributes:
        origin: the file's name, as an error message gives it.
        lines: the lines, as they are in the file, without line ends.
        numbers: of each line, its number in the file, from 1 on.
    """

    origin: str
    lines: list[str]
    numbers: Sequence[int]

    def where(self, index: int) -> str:
        """Return the place of a line in words."""
        return f"{self.origin}, line {self.numbers[index]}"


class Split(NamedTuple):
    """The two sides of one part of a corpus, line by line translations of each other."""

    name: str
    source: Text
    target: Text


class Corpus(NamedTuple):
    """Text to train on, to validate on, and to test on.

    Attributes:
        train: the pairs to train on.
        valid: one or several validation sets.
        test: one or several test sets.
        inputs: SHA-256 of each file that was read, by name.
        left_out: of each language, how many lines to train on were no text, by their tag.
    """

    train: Split
    valid: list[Split]
    test: list[Split]
    inputs: dict[str, str]
    left_out: dict[str, dict[str, int]]


def decode(content: bytes, origin: str) -> Text:
    """Return the lines of a UTF-8 file.

    Only line feeds, with or without a carriage return before them, end a line.

    Raises:
        UserError: the file is empty, not UTF-8, or has a NUL byte or a carriage return in a line.
    """
    if not content.strip():
        raise UserError(f"{origin}: the file is empty; give one with text in it")
    text = lines.decode(content.replace(b"\r\n", b"\n"), origin, _REFUSED)
    found = text.removesuffix("\n").split("\n")
    return Text(origin, found, range(1, len(found) + 1))


def check(split: Split, keep_all: bool) -> Split:
    """Return a split whose sides have equally many lines.

    Args:
        split: the split.
        keep_all: an empty line on either side is an error, because nothing may be left out.

    Raises:
        UserError: lines without a partner, or an empty line.
    """
    source, target = split.source, split.target
    shared = min(len(source.lines), len(target.lines))
    for side in (source, target):
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


def joined(name: str, splits: Sequence[Split]) -> Split:
    """Return several splits, each checked, as one: one after the other."""
    if len(splits) == 1:
        return splits[0]

    def side(texts: Sequence[Text]) -> Text:
        every = [line for text in texts for line in text.lines]
        return Text(" and ".join(text.origin for text in texts), every, range(1, len(every) + 1))

    return Split(name, side([s.source for s in splits]), side([s.target for s in splits]))
