"""Reads parallel text: lines of two files with the same index are translations of each other.

Lines keep their number in their file, so that errors can name it, until checked splits are joined.

IWSLT 2017 is read as published (Cettolo et al. 2017, "Overview of the IWSLT 2017 Evaluation
Campaign"): for a pair such as fr-en, a release has tagged talks for training,
``train.tags.fr-en.{fr,en}``, and ``IWSLT17.TED.SET.fr-en.{fr,en}.xml``, where SET is dev2010, or
tst2010 to tst2015.
"""

from __future__ import annotations

import re
import tarfile
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Union
from xml.sax.saxutils import unescape

from fairseq_posenc.errors import UserError
from fairseq_posenc.folders import checksum
from fairseq_posenc.tokens.files import decode_text, read_bytes

_REFUSED_BYTES = {b"\0": "a NUL byte", b"\r": "a carriage return inside a line"}
# Lines about a talk; all other lines of a train file are text. Titles and descriptions are left
# out, too: the speaker does not say them, and not all are translated.
_ABOUT_TALK = re.compile(
    r"\s*</?(url|keywords|speaker|talkid|title|description|reviewer|translator|doc|transcript)"
    r"\b[^>]*>"
)
# The test sets of the campaigns from 2010 to 2015.
IWSLT_TESTS = tuple(f"tst{year}" for year in range(2010, 2016))
_SEGMENT = re.compile(r'\s*<seg id="[^"]*">(.*)</seg>\s*')
_ENTITIES = {"&quot;": '"', "&apos;": "'"}


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

    @property
    def splits(self) -> dict[str, ParallelSplit]:
        """The parts by the names that fairseq gives them: train, valid, valid1, ... test."""
        splits = {"train": self.train}
        for prefix, sets in (("valid", self.valid), ("test", self.test)):
            splits |= {f"{prefix}{number or ''}": part for number, part in enumerate(sets)}
        return splits


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
                why = "lines are never left out of validation and test sets"
                advice = "remove the pair from both files, or fill it in"
                raise UserError(f"{side.locate(index)}: empty; {why}: {advice}")
    return split


def read_files(
    train: Path, valid: Sequence[Path], test: Sequence[Path], languages: tuple[str, str]
) -> ParallelCorpus:
    """Read a corpus of text files, one for each language, perhaps compressed with gzip.

    A set is named by the path of its files before ``.LANGUAGE`` or ``.LANGUAGE.gz``.

    Raises:
        UserError: a file is missing, is not UTF-8 text, or does not fit the other language.
    """
    inputs: dict[str, str] = {}

    def read(prefix: Path, refuse_empty: bool = True) -> ParallelSplit:
        sides = []
        for language in languages:
            path = _find_side(prefix, language)
            # Sets in two folders may have the same name.
            inputs[str(path) if path.name in inputs else path.name] = checksum(path)
            sides.append(decode(read_bytes(path), str(path)))
        return check_split(ParallelSplit(prefix.name, *sides), refuse_empty)

    return ParallelCorpus(
        train=read(train, refuse_empty=False),
        valid=[read(prefix) for prefix in valid],
        test=[read(prefix) for prefix in test],
        inputs=inputs,
        left_out={},
    )


def _find_side(prefix: Path, language: str) -> Path:
    """Find the file in one language, plain or compressed."""
    paths = [Path(f"{prefix}.{language}"), Path(f"{prefix}.{language}.gz")]
    found = [path for path in paths if path.exists()]
    if not found:
        raise UserError(f"neither {paths[0]} nor {paths[1]} exists; check name and language")
    if len(found) > 1:
        raise UserError(f"{paths[0]} and {paths[1]} both exist; remove the one that is not meant")
    return found[0]


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
    source, target = languages
    files = _list_release(path)
    inputs = {} if path.is_dir() else {path.name: checksum(path)}

    def read(pattern: str, language: str) -> NumberedLines:
        """Read a file; ``{}`` in ``pattern`` is PAIR.LANGUAGE, with the pair in either order."""
        pairs = (f"{source}-{target}", f"{target}-{source}")
        names = [pattern.format(f"{pair}.{language}") for pair in pairs]
        for name in (x for x in names if x in files):  # the first that the release has
            content = files[name]
            if isinstance(content, Path):
                inputs[name] = checksum(content)
                content = read_bytes(content)
            return decode(content, f"{path}: {name}")
        known = ", ".join(sorted(files)[:20]) or "none"
        advice = f"give the release of {source}-{target}, and name sets that it has"
        raise UserError(f"{path}: has no {names[0]}; its sets: {known}; {advice}")

    def read_set(names: str) -> ParallelSplit:
        if len(set(names.split("+"))) <= names.count("+"):  # n names have n - 1 signs
            raise UserError(f"{names}: a set occurs twice; name each once")
        parts = []
        for name in names.split("+"):
            pattern = f"IWSLT17.TED.{name}.{{}}.xml"
            sides = [_parse_segments(read(pattern, language)) for language in languages]
            parts.append(check_split(ParallelSplit(name, *sides), refuse_empty=True))
        return _join(names, parts) if len(parts) > 1 else parts[0]

    left_out: dict[str, dict[str, int]] = {}
    train = []
    for language in languages:
        text, left_out[language] = _parse_talks(read("train.tags.{}", language))
        train.append(text)
    return ParallelCorpus(
        train=check_split(ParallelSplit("train", *train), refuse_empty=False),
        valid=[read_set(names) for names in valid],
        test=[read_set(names) for names in test],
        inputs=inputs,
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


def _list_release(path: Path) -> dict[str, Union[Path, bytes]]:
    """List the files of a release by name: paths in a folder, or contents in a .tgz archive."""
    if path.is_dir():
        patterns = ("train.tags.*", "IWSLT17.TED.*.xml")
        return {file.name: file for pattern in patterns for file in sorted(path.rglob(pattern))}
    try:
        with tarfile.open(path) as archive:
            members = {Path(member.name).name: archive.extractfile(member) for member in archive}
            return {name: file.read() for name, file in members.items() if file}
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; give the .tgz of the release") from None
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        reason = str(error).partition("\n")[0].rstrip(":")  # tarfile lists what it tried
        raise UserError(f"{path}: not a whole .tgz archive ({reason}); fetch it again") from None


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
                form = 'a segment must be <seg id="1">TEXT</seg>, on a line of its own'
                place = f"{text.origin}, line {number}"
                raise UserError(f"{place}: {form}; fetch the release again")
            lines.append(unescape(match[1].strip(), _ENTITIES))
            numbers.append(number)
    if not lines:
        raise UserError(f"{text.origin}: contains no <seg>; give an IWSLT file")
    return NumberedLines(text.origin, lines, numbers)
