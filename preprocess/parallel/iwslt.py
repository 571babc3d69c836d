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
from xml.sax.saxutils import unescape

from fairseq_posenc.errors import UserError
from fairseq_posenc.folders import checksum
from fairseq_posenc.tokens.files import read_bytes

from .texts import NumberedLines, ParallelCorpus, ParallelSplit, check_split, decode

# Lines about a talk; all other lines of a train file are text. Titles and descriptions are left
# out, too: the speaker does not say them, and not all are translated.
_ABOUT_TALK = re.compile(
    r"\s*</?(url|keywords|speaker|talkid|title|description|reviewer|translator|doc|transcript)"
    r"\b[^>]*>"
)
TESTS = tuple(f"tst{year}" for year in range(2010, 2016))  # test sets of all campaigns since 2010
_SEGMENT = re.compile(r'\s*<seg id="[^"]*">(.*)</seg>\s*')
_ENTITIES = {"&quot;": '"', "&apos;": "'"}


class _Release:
    """The files of a release by name, from an archive or a folder."""

    def __init__(self, path: Path, languages: tuple[str, str]) -> None:
        self._path, self._languages = path, languages
        self._files: dict[str, Path] = {}
        self._contents: dict[str, bytes] = {}
        self.inputs: dict[str, str] = {}  # SHA-256 of the archive, or of each file that was read
        if path.is_dir():
            for pattern in ("train.tags.*", "IWSLT17.TED.*.xml"):
                self._files |= {file.name: file for file in sorted(path.rglob(pattern))}
        else:
            self._contents = _read_archive(path)
            self.inputs = {path.name: checksum(path)}

    def read(self, pattern: str, language: str) -> NumberedLines:
        """Read a file in one language; its name may have the languages in either order."""
        source, target = self._languages
        pairs = (f"{source}-{target}", f"{target}-{source}")
        names = [pattern.format(f"{pair}.{language}") for pair in pairs]
        for name in names:
            origin = f"{self._path}: {name}"
            if name in self._contents:
                return decode(self._contents[name], origin)
            if name in self._files:
                self.inputs[name] = checksum(self._files[name])
                return decode(read_bytes(self._files[name]), origin)
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
    release = _Release(path, languages)

    def read_set(names: str) -> ParallelSplit:
        parts = []
        for name in names.split("+"):
            pattern = f"IWSLT17.TED.{name}.{{}}.xml"
            sides = [_parse_segments(release.read(pattern, language)) for language in languages]
            parts.append(check_split(ParallelSplit(name, *sides), refuse_empty=True))
        return _join(names, parts) if len(parts) > 1 else parts[0]

    left_out: dict[str, dict[str, int]] = {}
    train = []
    for language in languages:
        text, left_out[language] = _parse_talks(release.read("train.tags.{}", language))
        train.append(text)
    return ParallelCorpus(
        train=check_split(ParallelSplit("train", *train), refuse_empty=False),
        valid=[read_set(names) for names in valid],
        test=[read_set(names) for names in test],
        inputs=release.inputs,
        left_out=left_out,
    )


def _join(name: str, splits: Sequence[ParallelSplit]) -> ParallelSplit:
    """Concatenate splits that were checked; the numbers of their lines begin at 1 again."""
    sides = []
    for texts in zip(*(split.sides for split in splits)):
        lines = [line for text in texts for line in text.lines]
        origin = " and ".join(text.origin for text in texts)
        sides.append(NumberedLines(origin, lines, range(1, len(lines) + 1)))
    return ParallelSplit(name, *sides)


def _read_archive(path: Path) -> dict[str, bytes]:
    """Read the files of a .tgz archive, by name without folders."""
    contents = {}
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                if file := archive.extractfile(member):  # None if it is no file
                    contents[Path(member.name).name] = file.read()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; give the .tgz of the release") from None
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise UserError(f"{path}: not a whole .tgz archive ({error}); fetch it again") from None
    return contents


def _parse_talks(text: NumberedLines) -> tuple[NumberedLines, dict[str, int]]:
    """Leave out the lines about talks from a train file; also count them, by tag."""
    lines: list[str] = []
    numbers: list[int] = []
    tags: Counter[str] = Counter()
    for number, line in zip(text.numbers, text.lines):
        if match := _ABOUT_TALK.match(line):
            tags[match[1]] += 1
        else:
            lines.append(unescape(line, _ENTITIES))
            numbers.append(number)
    return NumberedLines(text.origin, lines, numbers), dict(tags)


def _parse_segments(text: NumberedLines) -> NumberedLines:
    """Parse the segments of an XML file."""
    lines: list[str] = []
    numbers: list[int] = []
    for number, line in zip(text.numbers, text.lines):
        if "<seg" in line:
            match = _SEGMENT.fullmatch(line)
            if match is None or "<seg" in match[1]:
                raise UserError(
                    f'{text.origin}, line {number}: a segment must be <seg id="1">TEXT</seg>, on a '
                    "line of its own; fetch the release again"
                )
            lines.append(unescape(match[1].strip(), _ENTITIES))
            numbers.append(number)
    if not lines:
        raise UserError(f"{text.origin}: there is no <seg> in it; give an IWSLT file")
    return NumberedLines(text.origin, lines, numbers)
