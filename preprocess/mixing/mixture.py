"""Mixes corpora: counts all of them, then samples from them; it can resume at any chunk."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from binarize.formats import LineFormat
from binarize.items import InvalidLine, read_lines, skip_or_refuse
from binarize.pool import Pool
from binarize.shards import Input, describe_file
from binarize.sources import Place, read_chunks
from binarize.store import open_at
from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.running.folders import WholeFolder
from fairseq_posenc.workbench.running.progress import say

from .draw import BYTES, DOCUMENTS, CorpusRequest, SampledDocument, Sampler, measure

_TRAIN_DOCUMENTS = f"train_{DOCUMENTS}"  # a count of `Sampler`


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


class MixtureRules(NamedTuple):
    """Settings that hold for all corpora."""

    seed: int
    sentences: bool  # split lines into sentences
    unit: str  # unit of the text held out, `documents` or `lines`
    files: int  # number of training files
    skip_invalid: bool  # skip invalid lines, instead of stopping at the first
    workers: int  # number of processes


@dataclass
class MixtureState:
    """Progress of the work; everything before it is synced to disk."""

    step: int = 0  # for N corpora, step n < N counts corpus n, step N + n samples from it
    place: Place = field(default_factory=Place)  # beginning of the next chunk of that corpus
    pending: str = ""  # begin of a document that continues in the next chunk; text, for JSON
    totals: list[Counter[str]] = field(default_factory=list)  # `Sampler.totals` of each corpus
    done: list[Counter[str]] = field(default_factory=list)  # `Sampler.counts` of each corpus
    sizes: list[int] = field(default_factory=list)  # sizes of the written files in bytes

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> MixtureState:
        """Build a state from its ``vars``, saved as JSON."""
        counts = {
            name: [Counter[str](entry) for entry in saved[name]] for name in ("totals", "done")
        }
        return cls(**{**saved, **counts, "place": Place(*saved["place"])})


class Mixture:
    """Mixes corpora, each with its files, into text files in a folder.

    ``saved`` is the state that an earlier run saved in the folder; it is empty at first.
    """

    def __init__(
        self,
        corpora: list[tuple[CorpusRequest, list[Input]]],
        rules: MixtureRules,
        folder: WholeFolder,
        saved: dict[str, Any],
    ) -> None:
        self._corpora, self._rules, self._folder = corpora, rules, folder
        if saved:
            self._state = MixtureState.from_json(saved)
        else:
            totals = [Counter[str]() for _ in corpora]
            self._state = MixtureState(totals=totals, done=[Counter[str]() for _ in corpora])
        self._files = MixtureFiles(folder.partial, rules.files, self._state.sizes)

    def make(self) -> dict[str, Any]:
        """Do the remaining steps; return the manifest's entries.

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
            if not any(state.done):  # before any document is sampled, as checks are of whole texts
                for number in range(count):
                    self._make_sampler(number).check()
            num_sampled = state.step - count
            for number in range(num_sampled, count):
                self._sample(number)
                self._end_step()
        finally:
            self._files.close()
        for (corpus, _), counts in zip(self._corpora, state.done):
            if not counts[DOCUMENTS]:
                raise UserError(f"{corpus.option}: has no text")
        if not any(counts[_TRAIN_DOCUMENTS] for counts in state.done):
            raise UserError("nothing is left to train on: hold-out= takes all")
        outputs = {
            str(path.relative_to(self._folder.partial)): describe_file(path)
            for path in self._files.paths
        }
        return {
            "drawn": [dict(sorted(counts.items())) for counts in state.done],
            "outputs": outputs,
        }

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
        """Pass each document of a corpus to ``take``; save the state now and then."""
        state = self._state
        rules = self._rules
        corpus, inputs = self._corpora[number]
        pending = state.pending.encode()
        with Pool(rules.workers, cut_documents, corpus.format, rules.sentences) as pool:
            for chunk, (texts, invalid) in pool.map(read_chunks(inputs, state.place)):
                for message in skip_or_refuse(invalid, inputs, chunk, rules.skip_invalid):
                    say(f"skipped {message}")
                documents = [pending + texts[0], *texts[1:]]
                # The last document may continue in the next chunk.
                pending = b"" if chunk.ends_part else documents.pop()
                for document in filter(None, documents):
                    take(document)
                state.place = chunk.next_place
                state.pending = pending.decode()
                if self._folder.is_save_due:
                    self._save()

    def _end_step(self) -> None:
        self._state.step += 1
        self._state.place = Place()
        self._state.pending = ""
        self._save()

    def _make_sampler(self, number: int) -> Sampler:
        seed = f"{self._rules.seed} {number}"
        state = self._state
        corpus, _ = self._corpora[number]
        # The sampler counts in `state.done` itself, so a later one goes on from these counts.
        return Sampler(corpus, seed, self._rules.unit, state.totals[number], state.done[number])

    def _save(self) -> None:
        state = self._state
        state.sizes = self._files.sync()
        self._folder.save(vars(state))
        read = sum(counts[BYTES] for counts in (*state.totals, *state.done))
        say(f"step {state.step} of {2 * len(self._corpora)}: {read:,} bytes")
