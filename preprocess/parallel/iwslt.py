"""Reads IWSLT 2017 as published: tagged talks for training, XML files for validation and test.

Cettolo et al. 2017, "Overview of the IWSLT 2017 Evaluation Campaign". For a pair such as fr-en, a
release has ``train.tags.fr-en.{fr,en}`` and ``IWSLT17.TED.SET.fr-en.{fr,en}.xml``, where SET is
dev2010, or tst2010 to tst2015.
"""

from __future__ import annotations

import re
import tarfile
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import unescape

from fairseq_posenc.errors import UserError
from fairseq_posenc.folders import checksum
from fairseq_posenc.tokens.files import read_bytes

from .texts import (
    NumberedLines,
    ParallelCorpus,
    ParallelSplit,
    check_split,
    decode,
    join_splits,
)

# Lines about a talk; all other lines of a train file are text. Titles and descriptions are left
# out, too: the speaker does not say them, and not all are translated.
_ABOUT_TALK = re.compile(
    r"\s*</?(url|keywords|speaker|talkid|title|description|reviewer|translator|doc|transcript)"
    r"\b[^>]*>"
)
TESTS = tuple(f"tst{year}" for year in range(2010, 2016))  # test sets of all campaigns since 2010
_FIRST_TAG = "url"  # begins each talk
_SEGMENT = re.compile(r'\s*<seg id="([^"]*)">(.*)</seg>\s*')
_ENTITIES = {"&quot;": '"', "&apos;": "'"}


class _TalkStart(NamedTuple):
    """The place where a talk starts."""

    lines_before: int  # lines of text before it
    number: int  # of its first line in the file


class _Talks(NamedTuple):
    """The text of one side of the training data, and the places where its talks start."""

    text: NumberedLines
    starts: list[_TalkStart]
    tags: Counter[str]  # number of lines about the talks, by tag


class _Release:
    """The files of a release by name, from an archive or a folder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files: dict[str, Path] = {}
        self._contents: dict[str, bytes] = {}
        self.inputs: dict[str, str] = {}  # SHA-256 of the archive, or of each file that was read
        if path.is_dir():
            for pattern in ("train.tags.*", "IWSLT17.TED.*.xml"):
                self._files |= {file.name: file for file in sorted(path.rglob(pattern))}
        else:
            self._contents = _read_archive(path)
            self.inputs = {path.name: checksum(path)}

    def read(self, pattern: str, languages: tuple[str, str], language: str) -> NumberedLines:
        """Read a file in one language; its name may have the languages in either order."""
        source, target = languages
        pairs = (f"{source}-{target}", f"{target}-{source}")
        names = [pattern.format(f"{pair}.{language}") for pair in pairs]
        for name in names:
            if name in self._files and name not in self._contents:
                self._contents[name] = read_bytes(self._files[name])
                self.inputs[name] = checksum(self._files[name])
            if name in self._contents:
                return decode(self._contents[name], f"{self._path}: {name}")
        content = ", ".join(sorted({**self._files, **self._contents})[:20]) or "nothing"
        raise UserError(
            f"{self._path}: {names[0]} is not in it, but {content}; give the release of {source}-"
            f"{target}, and name sets that it has"
        )


def read_iwslt(
    path: Path, languages: tuple[str, str], valid: Sequence[str], test: Sequence[str]
) -> ParallelCorpus:
    """Read a release of IWSLT 2017.

    Args:
        path: a ``.tgz`` file, or a folder with its files.
        languages: source and target.
        valid: names of validation sets, such as ``dev2010``; ``tst2014+tst2015`` joins two.
        test: names of test sets.

    Raises:
        UserError: a file is missing, damaged, not UTF-8, or does not fit the other language.
    """
    release = _Release(path)
    source, target = (
        _parse_talks(release.read("train.tags.{}", languages, language)) for language in languages
    )
    _check_alignment(source, target)

    def read_set(names: str) -> ParallelSplit:
        parts = []
        for name in names.split("+"):
            pattern = f"IWSLT17.TED.{name}.{{}}.xml"
            texts = (release.read(pattern, languages, language) for language in languages)
            parts.append(check_split(_pair_segments(name, *texts), refuse_empty=True))
        return join_splits(names, parts)

    return ParallelCorpus(
        train=check_split(ParallelSplit("train", source.text, target.text), refuse_empty=False),
        valid=[read_set(names) for names in valid],
        test=[read_set(names) for names in test],
        inputs=release.inputs,
        left_out={languages[0]: dict(source.tags), languages[1]: dict(target.tags)},
    )


def _read_archive(path: Path) -> dict[str, bytes]:
    """Read the files of a .tgz archive, by name without folders."""
    contents = {}
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                if member.isfile():
                    file = archive.extractfile(member)
                    assert file  # None only if a member is no file
                    contents[Path(member.name).name] = file.read()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; give the .tgz of the release") from None
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise UserError(f"{path}: not a whole .tgz archive ({error}); fetch it again") from None
    return contents


def _parse_talks(text: NumberedLines) -> _Talks:
    """Separate the text of a train file from the lines about its talks."""
    lines: list[str] = []
    numbers: list[int] = []
    starts: list[_TalkStart] = []
    tags: Counter[str] = Counter()
    for number, line in zip(text.numbers, text.lines):
        if match := _ABOUT_TALK.match(line):
            tags[match[1]] += 1
            if match[1] == _FIRST_TAG:
                starts.append(_TalkStart(len(lines), number))
        else:
            lines.append(unescape(line, _ENTITIES))
            numbers.append(number)
    return _Talks(NumberedLines(text.origin, lines, numbers), starts, tags)


def _check_alignment(source: _Talks, target: _Talks) -> None:
    """Check that every talk starts at the same line of text on both sides."""
    for talk, (ours, theirs) in enumerate(zip(source.starts, target.starts), start=1):
        if ours.lines_before != theirs.lines_before:
            raise UserError(
                f"{source.text.origin}, line {ours.number}: talk {talk} begins after "
                f"{ours.lines_before:,} lines of text, but after {theirs.lines_before:,} in "
                f"{target.text.origin}, line {theirs.number}: the talk before it is not aligned; "
                "fetch the release again"
            )


def _pair_segments(
    name: str, source_text: NumberedLines, target_text: NumberedLines
) -> ParallelSplit:
    """Pair the segments of a set in both languages, and check that they have the same labels."""
    source, source_labels = _parse_segments(source_text)
    target, target_labels = _parse_segments(target_text)
    for index, (label, other) in enumerate(zip(source_labels, target_labels)):
        if label != other:
            raise UserError(
                f"{source.locate(index)}: this is {label}, but {target.locate(index)}: "
                f"{other}; both files must have the same segments"
            )
    return ParallelSplit(name, source, target)


def _parse_segments(text: NumberedLines) -> tuple[NumberedLines, list[str]]:
    """Parse the segments of an XML file; also return a label of each, with its document."""
    lines: list[str] = []
    numbers: list[int] = []
    labels: list[str] = []
    document = 0
    for number, line in zip(text.numbers, text.lines):
        document += "<doc " in line
        if "<seg" in line:
            match = _SEGMENT.fullmatch(line)
            if match is None or "<seg" in match[2]:
                raise UserError(
                    f'{text.origin}, line {number}: a segment must be <seg id="1">TEXT</seg>, on a '
                    "line of its own; fetch the release again"
                )
            lines.append(unescape(match[2].strip(), _ENTITIES))
            numbers.append(number)
            labels.append(f"segment {match[1]} of document {document}")
    if not lines:
        raise UserError(f"{text.origin}: there is no <seg> in it; give an IWSLT file")
    return NumberedLines(text.origin, lines, numbers), labels
