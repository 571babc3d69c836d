r"""Mixes several corpora, each sampled to a size, into one text, and holds out a part of it.

Each --corpus is a format (plain, json, wikipedia, wikitext), files or folders, and settings:
size=64GiB samples documents up to this size, lines=158400000 up to this number of lines,
hold-out=50000 holds out this number of documents (see --unit) for validation; where=FIELD=VALUE and
field=NAME are for json.

  fairseq-posenc preprocess mix --out text/books-wiki --sentences --unit lines \
      --corpus plain books/ hold-out=5000 --corpus wikipedia extracts/ hold-out=15000
  fairseq-posenc preprocess plain_text --train text/books-wiki/train/ \
      --valid text/books-wiki/valid.txt --out data-bin/books-wiki --longest-line 511 \
      --encoder-json encoder.json --vocab-bpe vocab.bpe --dict dict.txt

OUT/train has text files, each with documents of all corpora; OUT/valid.txt has the held-out text,
and OUT/manifest.json all counts. The same seed samples the same documents on every machine.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from fractions import Fraction
from functools import cache, partial
from io import BytesIO
from pathlib import Path
from typing import NamedTuple, Optional

from binarize import formats
from binarize.formats import JsonField, LineFormat
from binarize.items import InvalidLine, check_invalid, read_lines
from binarize.options import add_invalid_lines, add_workers, integer
from binarize.output import Manifest, describe_file, format_counts, make_folder, open_at, say, sync
from binarize.pool import map_chunks
from binarize.sources import SourceFile, combine_checksums, find_files, read_chunks, read_source
from fairseq_posenc.errors import UserError, counted

DOCUMENTS, LINES, BYTES = "documents", "lines", "bytes"
_FORMATS: dict[str, LineFormat] = {
    "plain": formats.plain,
    "json": JsonField("text"),
    "wikipedia": formats.wikipedia,
    "wikitext": formats.WikiText(articles=True, headings=True),
}
_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


class CorpusRequest(NamedTuple):
    """A corpus to sample from: the parsed ``--corpus``."""

    option: str  # as given, for messages
    format: LineFormat  # format of its files
    paths: list[str]  # files and folders
    size: Optional[int]  # amount to sample, in `unit`; None for all
    unit: str  # `bytes`, or `lines`, which are sentences with `--sentences`
    hold_out: int  # number of lines or documents for validation


@dataclass(frozen=True)
class MixtureRules:
    """Settings that hold for all corpora, with the names of their options."""

    seed: int
    sentences: bool  # split lines into sentences
    unit: str  # unit of the held-out text, `documents` or `lines`
    files: int  # number of training files
    invalid_lines: str  # `skip` invalid lines, or `error`: stop at the first
    workers: int  # number of processes


def run(args: argparse.Namespace) -> None:
    """Mix the corpora; the corpora that an interrupted run finished are kept."""
    # Once for each file, even if several corpora are in it, as in the Pile.
    read = cache(read_source)
    corpora = [
        (corpus, list(map(read, find_files(corpus.paths, args.out))))
        for corpus in map(parse_corpus, args.corpus)
    ]
    rules = MixtureRules(**{x.name: getattr(args, x.name) for x in fields(MixtureRules)})
    request = {  # all that the folder's content depends on
        # The text is the same for any number of workers.
        "options": {**vars(rules), "workers": None},
        "corpora": [
            [formats.describe_format(corpus.format), corpus.size, corpus.unit, corpus.hold_out]
            for corpus, _ in corpora
        ],
        "inputs": [combine_checksums(files) for _, files in corpora],
    }
    make_folder(args.out, request, partial(mix_corpora, corpora, rules))


def mix_corpora(
    corpora: Sequence[tuple[CorpusRequest, list[SourceFile]]],
    rules: MixtureRules,
    manifest: Manifest,
) -> None:
    """Mix corpora, each with its files, into text files in the folder of a manifest.

    ``train/00.txt`` and so on get the documents in turn, with an empty line after each;
    ``valid.txt`` has the held-out text.

    Raises:
        UserError: a file cannot be read, a line is invalid, or a corpus is too small or empty.
    """
    samplers = []
    for number, (corpus, files) in enumerate(corpora):
        totals = manifest.read("totals", str(number))  # as `measure` counts
        if totals is None:
            totals = Counter[str]()
            if corpus.size is not None or corpus.hold_out:  # sampling needs the totals
                say(f"counting {corpus.option}")
                for document in read_documents(corpus.format, files, rules):
                    totals.update(measure(document))
            manifest.save("totals", str(number), totals)
        samplers.append(Sampler(corpus, f"{rules.seed} {number}", rules.unit, Counter(totals)))
    width = len(str(rules.files - 1))  # of the longest number in a file's name
    names = [*(f"train/{number:0{width}d}.txt" for number in range(rules.files)), "valid.txt"]
    paths = [manifest.folder / name for name in names]
    paths[0].parent.mkdir(exist_ok=True)
    sizes = [0] * len(paths)  # bytes of the text of all corpora so far
    num_train = 0  # documents with text to train on
    for number, ((corpus, files), sampler) in enumerate(zip(corpora, samplers)):
        finished = manifest.read("corpora", str(number))
        if finished is None:  # by an interrupted run
            documents = read_documents(corpus.format, files, rules)
            new_sizes = _sample(documents, sampler, paths, sizes)  # also fills `sampler.counts`
            finished = {"sizes": new_sizes, "drawn": dict(sorted(sampler.counts.items()))}
            if not finished["drawn"]:
                raise UserError(f"{corpus.option}: has no text")
            manifest.save("corpora", str(number), finished)
        sizes = finished["sizes"]
        num_train += finished["drawn"].get(f"train_{DOCUMENTS}", 0)
        print(f"{corpus.option}: {format_counts(finished['drawn'])}", flush=True)
    if not num_train:
        raise UserError("nothing is left to train on: lower hold-out=, or raise size= or lines=")
    for name, path in zip(names, paths):
        manifest.save("outputs", name, describe_file(path))


def _sample(
    documents: Iterator[bytes], sampler: Sampler, paths: Sequence[Path], sizes: Sequence[int]
) -> list[int]:
    """Append what is sampled to the files, the last of which is for held-out text.

    Args:
        documents: the documents of a corpus.
        sampler: the sampler of the corpus.
        paths: the files.
        sizes: their bytes to keep; the rest was left by an interrupted run.

    Returns:
        The new sizes of the files, which are synced to disk.
    """
    with ExitStack() as stack:
        files = [stack.enter_context(open_at(path, size)) for path, size in zip(paths, sizes)]
        *train_files, valid_file = files
        for document in documents:
            train_number = sampler.counts[f"train_{DOCUMENTS}"]
            train, valid = sampler.sample(document)
            if train:
                train_files[train_number % len(train_files)].write(train + b"\n")
            valid_file.write(valid)
        sync(*files)
        return [file.tell() for file in files]


def read_documents(
    line_format: LineFormat, files: Sequence[SourceFile], rules: MixtureRules
) -> Iterator[bytes]:
    r"""Yield the documents of a corpus, with ``\n`` after every line."""
    pending = b""  # beginning of a document that continues in the next chunk
    cut = partial(cut_documents, line_format=line_format, sentences=rules.sentences)
    for chunk, (texts, invalid) in map_chunks(read_chunks(files), rules.workers, cut):
        for message in check_invalid(invalid, chunk, rules.invalid_lines):
            say(f"skipped {message}")
        documents = [pending + texts[0], *texts[1:]]
        # The last document may continue in the next chunk.
        pending = b"" if chunk.ends_file else documents.pop()
        yield from filter(None, documents)


def cut_documents(
    data: bytes, line_format: LineFormat, sentences: bool
) -> tuple[list[bytes], list[InvalidLine]]:
    r"""Cut a chunk of a file where documents end; worker processes call it.

    Returns:
        The text of each document, with ``\n`` after every line, and the lines that are left out.
        The first text continues the last document of the chunk before, and may be empty.
    """
    lines, _, invalid = read_lines(data, line_format, sentences)
    texts = [b""]
    for is_end, group in itertools.groupby(lines, lambda line: not line):
        if is_end:
            texts.append(b"")
        else:
            texts[-1] = "".join(f"{line}\n" for line in group).encode()
    return texts, invalid


class Sampler:
    """Samples documents of one corpus to train on, and text to hold out, at random.

    Both use Knuth's selection sampling (The Art of Computer Programming, 3.4.2, algorithm S): to
    choose n of N items, the next item is chosen with probability (n - chosen) / (N - seen). All
    items have the same chance, exactly n are chosen, and nothing is kept in memory. For a size in
    bytes or lines, n, N and the counts are in this unit, and documents are chosen whole: the size
    is met to within one document. The random number is a hash of the seed and the number of the
    document or line.

    A document is text in which every line ends with a line feed; an empty line follows it in a
    file.

    Args:
        corpus: how much to sample, and to hold out.
        seed: seed of the random numbers.
        hold_out_unit: unit of the held-out text, ``documents`` or ``lines``.
        totals: ``documents``, ``lines`` and ``bytes`` of the corpus, if sampling needs them.

    Raises:
        UserError: the corpus has less than ``corpus`` wants.
    """

    def __init__(
        self, corpus: CorpusRequest, seed: str, hold_out_unit: str, totals: Counter[str]
    ) -> None:
        self.corpus, self.seed = corpus, seed
        self.hold_out_unit, self.totals = hold_out_unit, totals
        # `documents`, `lines` and `bytes` read so far, with `train_` before them those to train on;
        # and `held_out`, in `hold_out_unit`.
        self.counts: Counter[str] = Counter()
        available = totals[hold_out_unit]
        if corpus.hold_out > available:
            raise UserError(
                f"{corpus.option}: has {counted(available, hold_out_unit)}, fewer than hold-out"
            )
        rest = self._estimate_rest()
        if corpus.size is not None and corpus.size > rest:
            raise UserError(
                f"{corpus.option}: has only {rest:,.0f} {corpus.unit} to draw from, less than the "
                f"{corpus.size:,} asked for"
            )

    def sample(self, document: bytes) -> tuple[bytes, bytes]:
        """Decide about the next document: return its text to train on, and its held-out text."""
        corpus, counts = self.corpus, self.counts
        train, valid = document, b""
        if corpus.hold_out and self.hold_out_unit == LINES:
            train, valid = self._split_lines(document)  # no empty lines between those held out
        elif corpus.hold_out and self._choose_held_out(counts[DOCUMENTS]):
            train, valid = b"", document + b"\n"
        counts.update(measure(document))
        if corpus.size is not None and train:
            wanted = corpus.size - counts[f"train_{corpus.unit}"]
            rest = measure(train)[corpus.unit] + self._estimate_rest()  # this document, and later
            if self._random("size", counts[DOCUMENTS]) * rest >= wanted:
                train = b""
        counts.update({f"train_{name}": value for name, value in measure(train).items()})
        return train, valid

    def _estimate_rest(self) -> float:
        """Estimate how much text to train on follows what is counted, in the unit of the size.

        Of the text to hold out from it, only the expected share is known.
        """
        rest = self.totals[self.hold_out_unit] - self.counts[self.hold_out_unit]
        still_to_hold = self.corpus.hold_out - self.counts["held_out"]
        train_share = 1 - still_to_hold / rest if rest else 0
        unit = self.corpus.unit
        return (self.totals[unit] - self.counts[unit]) * train_share

    def _split_lines(self, document: bytes) -> tuple[bytes, bytes]:
        """Split a document into the lines to train on and those held out."""
        parts: dict[bool, list[bytes]] = {False: [], True: []}  # by whether lines are held out
        for number, line in enumerate(BytesIO(document), self.counts[LINES]):
            parts[self._choose_held_out(number)].append(line)
        return b"".join(parts[False]), b"".join(parts[True])

    def _choose_held_out(self, number: int) -> bool:
        """Decide whether to hold out a document or line by its number, and count it if so."""
        still_to_hold = self.corpus.hold_out - self.counts["held_out"]
        rest = self.totals[self.hold_out_unit] - number
        is_held = self._random("hold-out", number) * rest < still_to_hold
        self.counts["held_out"] += int(is_held)
        return is_held

    def _random(self, purpose: str, number: int) -> float:
        """Compute the random number of a document or line, from 0 to 1."""
        text = f"{self.seed} {purpose} {number}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") / (1 << 64)


def measure(document: bytes) -> Counter[str]:
    """Count a document; its bytes include the empty line that follows it in a file."""
    if not document:
        return Counter()
    return Counter({DOCUMENTS: 1, LINES: document.count(b"\n"), BYTES: len(document) + 1})


def parse_corpus(words: Sequence[str]) -> CorpusRequest:
    """Parse ``FORMAT PATH ... [SETTING=VALUE ...]``.

    Raises:
        UserError: the words have another form.
    """
    option = f"--corpus {' '.join(words)}"
    settings: dict[str, str] = {}
    paths = []
    for word in words[1:]:
        name, equals, value = word.partition("=")
        if equals and name in settings:
            raise UserError(f"{option}: {name}= is given twice")
        if equals and name in ("size", "lines", "hold-out", "field", "where"):
            settings[name] = value
        else:
            paths.append(word)
    if words[0] not in _FORMATS or not paths:
        raise UserError(f"{option}: give a format ({', '.join(_FORMATS)}), then files or folders")
    line_format = _FORMATS[words[0]]
    if isinstance(line_format, JsonField):
        where = formats.parse_where(settings.get("where"))
        line_format = JsonField(settings.get("field", "text"), where)
    elif settings.keys() & {"field", "where"}:
        raise UserError(f"{option}: field= and where= are for json")
    for name in ("lines", "hold-out"):
        if not re.fullmatch(r"\d{1,18}", settings.get(name, "0")):
            raise UserError(
                f"{option}: {name}= is a whole number of lines or documents, not {settings[name]!r}"
            )
    size = parse_size(settings["size"]) if "size" in settings else None
    if "lines" in settings:
        if size is not None:
            raise UserError(f"{option}: give size= or lines=, not both")
        size = int(settings["lines"])
    if size == 0:
        raise UserError(f"{option}: draws nothing; give a size= or lines= above 0, or neither")
    unit = LINES if "lines" in settings else BYTES
    return CorpusRequest(option, line_format, paths, size, unit, int(settings.get("hold-out", "0")))


def parse_size(text: str) -> int:
    """Parse a size such as ``64GiB`` into bytes.

    Raises:
        UserError: the text is not a size.
    """
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?)(B|KiB|MiB|GiB)", text)
    if not match:
        raise UserError(f"size={text}: write a number of {', '.join(_UNITS)}, as in 64GiB")
    return int(Fraction(match[1]) * _UNITS[match[2]])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add(
        "--corpus",
        action="append",
        nargs="+",
        required=True,
        metavar="WORD",
        help="FORMAT PATH ... [size=64GiB | lines=N] [hold-out=N] [field=NAME] [where=FIELD=VALUE]",
    )
    add("--out", type=Path, required=True, help="folder to make")
    add("--seed", type=int, default=1, help="random seed (default: %(default)s)")
    add("--sentences", action="store_true", help="split lines into sentences, by rules")
    text = "unit of hold-out=; lines are sentences with --sentences (default: %(default)s)"
    add("--unit", choices=(DOCUMENTS, LINES), default=DOCUMENTS, help=text)
    text = "number of training files (default: %(default)s)"
    add("--files", type=integer(1, 1024), metavar="N", default=16, help=text)
    add_invalid_lines(parser)
    add_workers(parser)
