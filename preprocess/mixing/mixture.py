"""Mixes corpora: counts all of them, then samples from them; it can resume at any corpus."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from binarize.formats import LineFormat
from binarize.items import InvalidLine, describe_invalid, read_lines
from binarize.output import Manifest, describe_file, format_counts, say
from binarize.pool import map_chunks
from binarize.shards import Extent
from binarize.sources import read_chunks
from binarize.split import open_at
from fairseq_posenc.errors import UserError

from .draw import DOCUMENTS, CorpusRequest, Sampler, measure


@dataclass(frozen=True)
class MixtureRules:
    """Settings that hold for all corpora."""

    seed: int
    sentences: bool  # split lines into sentences
    unit: str  # unit of the text held out, `documents` or `lines`
    files: int  # number of training files
    invalid_lines: str  # `skip` invalid lines, or `error`: stop at the first
    workers: int  # number of processes


def mix_corpora(
    corpora: Sequence[tuple[CorpusRequest, list[Extent]]], rules: MixtureRules, manifest: Manifest
) -> None:
    """Mix corpora, each with its parts of files, into text files in the folder of a manifest.

    ``train/00.txt`` and so on get the documents in turn, with an empty line after each;
    ``valid.txt`` has the text held out.

    Raises:
        UserError: a file cannot be read, a line is invalid, or a corpus is too small or empty.
    """
    samplers = []
    for number, (corpus, parts) in enumerate(corpora):
        totals = manifest.read("totals", str(number))
        if totals is None:
            totals = Counter[str]()
            if corpus.size is not None or corpus.hold_out:  # sampling needs the totals
                say(f"counting {corpus.option}")
                for document in read_documents(corpus.format, parts, rules):
                    totals.update(measure(document))
            manifest.save("totals", str(number), totals)
        samplers.append(Sampler(corpus, f"{rules.seed} {number}", rules.unit, Counter(totals)))
    width = len(str(rules.files - 1))
    names = [*(f"train/{number:0{width}d}.txt" for number in range(rules.files)), "valid.txt"]
    paths = [manifest.folder / name for name in names]
    paths[0].parent.mkdir(exist_ok=True)
    sizes = [0] * len(paths)  # of the text of all corpora so far
    num_train = 0  # documents with text to train on
    for number, ((corpus, parts), sampler) in enumerate(zip(corpora, samplers)):
        finished = manifest.read("corpora", str(number))
        if finished is None:
            documents = read_documents(corpus.format, parts, rules)
            finished = {"sizes": _sample(documents, sampler, paths, sizes)}
            finished["drawn"] = dict(sorted(sampler.counts.items()))
            if not sampler.counts[DOCUMENTS]:
                raise UserError(f"{corpus.option}: has no text")
            manifest.save("corpora", str(number), finished)
        sizes = finished["sizes"]
        num_train += finished["drawn"].get(f"train_{DOCUMENTS}", 0)
        print(f"{corpus.option}: {format_counts(finished['drawn'])}", flush=True)
    if not num_train:
        raise UserError("nothing is left to train on: hold-out= takes all")
    for name, path in zip(names, paths):
        manifest.save("outputs", name, describe_file(path))


def _sample(
    documents: Iterator[bytes], sampler: Sampler, paths: Sequence[Path], sizes: Sequence[int]
) -> list[int]:
    """Append what is sampled to the files, the last of which is for text held out.

    Args:
        documents: the documents of a corpus.
        sampler: the sampler of the corpus.
        paths: the files.
        sizes: their bytes to keep; the rest is of an interrupted run.

    Returns:
        The new sizes; the files are synced to disk.
    """
    *train_files, valid_file = files = [open_at(path, size) for path, size in zip(paths, sizes)]
    try:
        for document in documents:
            train_number = sampler.counts[f"train_{DOCUMENTS}"]
            train, valid = sampler.sample(document)
            if train:
                train_files[train_number % len(train_files)].write(train + b"\n")
            valid_file.write(valid)
        for file in files:
            file.flush()
            os.fsync(file.fileno())
        return [file.tell() for file in files]
    finally:
        for file in files:
            file.close()


def read_documents(
    line_format: LineFormat, parts: Sequence[Extent], rules: MixtureRules
) -> Iterator[bytes]:
    r"""Yield the documents of a corpus, with ``\n`` after every line."""
    pending = b""  # begin of a document that continues in the next chunk
    cut = partial(cut_documents, line_format=line_format, sentences=rules.sentences)
    for chunk, (texts, invalid) in map_chunks(read_chunks(parts), rules.workers, cut):
        for message in describe_invalid(invalid, chunk, rules.invalid_lines == "skip"):
            say(f"skipped {message}")
        documents = [pending + texts[0], *texts[1:]]
        # The last document may continue in the next chunk.
        pending = b"" if chunk.ends_part else documents.pop()
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
