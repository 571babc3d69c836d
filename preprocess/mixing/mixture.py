"""Mixes corpora: counts all of them, then samples from them; it can resume at any corpus."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from binarize.formats import LineFormat
from binarize.items import InvalidLine, read_lines, skip_or_refuse
from binarize.output import Manifest, describe_file, say
from binarize.pool import Pool
from binarize.shards import Input
from binarize.sources import read_chunks
from binarize.store import open_at
from fairseq_posenc.errors import UserError

from .draw import BYTES, DOCUMENTS, CorpusRequest, SampledDocument, Sampler, measure

_TRAIN_DOCUMENTS = f"train_{DOCUMENTS}"  # a count of `Sampler`
_COUNTS = ("totals", "drawn")  # counters of `MixtureState`


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


class MixtureFiles:
    """Writes ``train/00.txt`` and so on, with an empty line after each document, and ``valid.txt``.

    Documents go to the ``count`` training files in turn. Files are cut to ``sizes``, the result of
    the last :meth:`sync`; it is empty at first.
    """

    def __init__(self, folder: Path, count: int, sizes: Sequence[int]) -> None:
        train = folder / "train"
        train.mkdir(exist_ok=True)
        width = len(str(count - 1))
        self.paths = [train / f"{number:0{width}d}.txt" for number in range(count)]
        self.paths.append(folder / "valid.txt")
        sizes = sizes or [0] * len(self.paths)
        self._files = [open_at(path, size) for path, size in zip(self.paths, sizes)]

    def write(self, document: SampledDocument, number: int) -> None:
        """Write the parts of a document; ``number`` counts documents with text to train on."""
        *train_files, valid_file = self._files
        if document.train:
            train_files[number % len(train_files)].write(document.train + b"\n")
        valid_file.write(document.valid)

    def sync(self) -> list[int]:
        """Write everything to disk; return the size of each file in bytes."""
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
        return [file.tell() for file in self._files]

    def close(self) -> None:
        """Close the files as they are."""
        for file in self._files:
            file.close()


@dataclass(frozen=True)
class MixtureRules:
    """Settings that hold for all corpora."""

    seed: int
    sentences: bool  # split lines into sentences
    unit: str  # unit of the text held out, `documents` or `lines`
    files: int  # number of training files
    skip_invalid: bool  # skip invalid lines, instead of stopping at the first
    workers: int  # number of processes


@dataclass
class MixtureState:
    """The steps that are finished; everything in them is synced to disk."""

    step: int = 0  # for N corpora, step n < N counts corpus n, step N + n samples from it
    totals: list[Counter[str]] = field(default_factory=list)  # `Sampler.totals` of each corpus
    drawn: list[Counter[str]] = field(default_factory=list)  # `Sampler.counts` of each corpus
    sizes: list[int] = field(default_factory=list)  # sizes of the written files in bytes

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> MixtureState:
        """Build a state from its ``vars``, saved as JSON."""
        counts = {name: [Counter[str](entry) for entry in saved[name]] for name in _COUNTS}
        return cls(**{**saved, **counts})


class Mixture:
    """Mixes corpora, each with its files, into text files in the folder of a manifest."""

    def __init__(
        self,
        corpora: list[tuple[CorpusRequest, list[Input]]],
        rules: MixtureRules,
        manifest: Manifest,
    ) -> None:
        self._corpora, self._rules, self._manifest = corpora, rules, manifest
        if saved := manifest.read("state"):
            self._state = MixtureState.from_json(saved)
        else:
            totals = [Counter[str]() for _ in corpora]
            self._state = MixtureState(0, totals, [Counter[str]() for _ in corpora])
        self._files = MixtureFiles(manifest.folder, rules.files, self._state.sizes)

    def make(self) -> list[Counter[str]]:
        """Do the remaining steps; return the counts of each corpus.

        Raises:
            UserError: a file cannot be read, a line is invalid, or a corpus is too small or empty.
        """
        state = self._state
        count = len(self._corpora)
        try:
            for number in range(state.step, count):
                corpus, _ = self._corpora[number]
                if corpus.size is not None or corpus.hold_out:  # sampling needs the totals
                    self._count(number)
                self._end_step()
            if not any(state.drawn):  # before any is sampled, as checks are of whole texts
                for number in range(count):
                    self._make_sampler(number).check()
            for number in range(state.step - count, count):
                self._sample(number)
                self._end_step()
        finally:
            self._files.close()
        for (corpus, _), counts in zip(self._corpora, state.drawn):
            if not counts[DOCUMENTS]:
                raise UserError(f"{corpus.option}: has no text")
        if not any(counts[_TRAIN_DOCUMENTS] for counts in state.drawn):
            raise UserError("nothing is left to train on: hold-out= takes all")
        folder = self._manifest.folder
        outputs = {str(path.relative_to(folder)): describe_file(path) for path in self._files.paths}
        self._manifest.save("drawn", [dict(sorted(counts.items())) for counts in state.drawn])
        self._manifest.save("outputs", outputs)
        return state.drawn

    def _count(self, number: int) -> None:
        totals = self._state.totals[number]
        self._read(number, lambda document: totals.update(measure(document)))

    def _sample(self, number: int) -> None:
        sampler = self._make_sampler(number)

        def write(document: bytes) -> None:
            train_number = sampler.counts[_TRAIN_DOCUMENTS]
            self._files.write(sampler.sample(document), train_number)

        self._read(number, write)

    def _read(self, number: int, take: Callable[[bytes], None]) -> None:
        """Pass each document of a corpus to ``take``."""
        rules = self._rules
        corpus, inputs = self._corpora[number]
        pending = b""  # begin of a document that continues in the next chunk
        with Pool(rules.workers, cut_documents, corpus.format, rules.sentences) as pool:
            for chunk, (texts, invalid) in pool.map(read_chunks(inputs)):
                for message in skip_or_refuse(invalid, inputs, chunk, rules.skip_invalid):
                    say(f"skipped {message}")
                documents = [pending + texts[0], *texts[1:]]
                # The last document may continue in the next chunk.
                pending = b"" if chunk.ends_part else documents.pop()
                for document in filter(None, documents):
                    take(document)

    def _end_step(self) -> None:
        state = self._state
        state.step += 1
        state.sizes = self._files.sync()
        self._manifest.save("state", vars(state))
        read = sum(counts[BYTES] for counts in (*state.totals, *state.drawn))
        say(f"step {state.step} of {2 * len(self._corpora)}: {read:,} bytes")

    def _make_sampler(self, number: int) -> Sampler:
        seed = f"{self._rules.seed} {number}"
        state = self._state
        corpus, _ = self._corpora[number]
        # The sampler counts in `state.drawn` itself.
        return Sampler(corpus, seed, self._rules.unit, state.totals[number], state.drawn[number])
