"""Mixes corpora: counts all of them, then samples from them; it can resume anywhere."""

from __future__ import annotations

import itertools
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from binarize.items import InvalidLine, TextRules, check_invalid, read_lines
from binarize.pool import Pool
from binarize.shards import Input, describe_file
from binarize.sources import Place, read_chunks
from binarize.store import open_at
from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.running.folders import WholeFolder
from fairseq_posenc.workbench.running.progress import say

from .draw import BYTES, DOCUMENTS, CorpusRequest, Draw, Drawn, measure


def cut_documents(data: bytes, text: TextRules) -> tuple[list[bytes], list[InvalidLine]]:
    r"""Cut a chunk of a file where documents end, in a worker process.

    Returns:
        The text of each document, with ``\n`` after every line; the last document may continue in
        the next chunk. And the lines that are left out.
    """
    lines, _, invalid = read_lines(data, text)
    texts = [b""]
    for is_end, group in itertools.groupby(lines, lambda line: not line):
        if is_end:
            texts += [b""] * len(list(group))
        else:
            texts[-1] = "".join(f"{line}\n" for line in group).encode()
    return texts, invalid


class Texts:
    """Writes ``train/00.txt`` and so on, with an empty line after each document, and ``valid.txt``.

    Args:
        folder: folder of the files.
        count: number of training files, to which documents are written in turn.
        sizes: result of :meth:`sync`, empty at first; text written after that is dropped.
    """

    def __init__(self, folder: Path, count: int, sizes: Sequence[int]) -> None:
        train = folder / "train"
        train.mkdir(exist_ok=True)
        width = len(str(count - 1))
        self.paths = [train / f"{number:0{width}d}.txt" for number in range(count)]
        self.paths.append(folder / "valid.txt")
        sizes = sizes or [0] * len(self.paths)
        self._files = [open_at(path, size) for path, size in zip(self.paths, sizes)]

    def write(self, drawn: Drawn, number: int) -> None:
        """Write the drawn parts of a document; ``number`` counts the documents from 0."""
        if drawn.train:
            self._files[number % (len(self._files) - 1)].write(drawn.train + b"\n")
        self._files[-1].write(drawn.valid)

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


SECONDS_BETWEEN_SAVES = 10.0


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
    pending: str = ""  # the last document so far, which continues in the next chunk
    totals: list[Counter[str]] = field(default_factory=list)  # `Draw.total` of each corpus
    done: list[Counter[str]] = field(default_factory=list)  # `Draw.done` of each corpus
    sizes: list[int] = field(default_factory=list)  # sizes of the written files in bytes

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> MixtureState:
        """Build a state from its ``vars``, saved as JSON."""
        counts = {
            name: [Counter[str](entry) for entry in saved[name]] for name in ("totals", "done")
        }
        return cls(**{**saved, **counts, "place": Place(*saved["place"])})


class Mixture:
    """Mixes corpora into text files in a folder.

    Args:
        corpora: requests, and the parts of files of each.
        rules: settings of all corpora.
        folder: folder of the text files and of the saved state.
        saved: the state that an earlier run saved; empty for none.
    """

    def __init__(
        self,
        corpora: list[tuple[CorpusRequest, list[Input]]],
        rules: MixtureRules,
        folder: WholeFolder,
        saved: dict[str, Any],
    ) -> None:
        none = [Counter[str]() for _ in corpora]
        fresh = MixtureState(totals=none, done=[counts.copy() for counts in none])
        self._corpora, self._rules, self._folder = corpora, rules, folder
        self._state = MixtureState.from_json(saved) if saved else fresh
        self._texts = Texts(folder.partial, rules.files, self._state.sizes)
        self._saved = time.monotonic()

    def make(self) -> dict[str, Any]:
        """Do the remaining steps; return the manifest's entries.

        Raises:
            UserError: a file cannot be read, a line is invalid, or a corpus is too small.
        """
        state = self._state
        count = len(self._corpora)
        try:
            while state.step < 2 * count:
                number = state.step % count
                if state.step == count and state.place == Place():
                    for corpus_number in range(count):
                        self._make_draw(corpus_number).check()
                corpus, _ = self._corpora[number]
                if state.step >= count or corpus.size is not None or corpus.hold_out:
                    self._process_corpus(number, is_count=state.step < count)
                state.step = state.step + 1
                state.place = Place()
                state.pending = ""
                self._save()
        finally:
            self._texts.close()
        self._refuse_empty_corpora()
        return self._summarise()

    def _process_corpus(self, number: int, is_count: bool) -> None:
        """Count a corpus, or sample from it."""
        state, rules, (corpus, inputs) = self._state, self._rules, self._corpora[number]
        draw = self._make_draw(number)
        pending = state.pending.encode()
        text = TextRules(corpus.format, rules.sentences, "keep")
        with Pool(rules.workers, cut_documents, text) as opened:
            for mark, (texts, invalid) in opened.map(read_chunks(inputs, state.place)):
                for message in check_invalid(invalid, inputs, mark, rules.skip_invalid):
                    say(f"skipped {message}")
                documents = [pending + texts[0], *texts[1:]]
                # The last document continues in the next chunk.
                pending = b"" if mark.is_last else documents.pop()
                for document in filter(None, documents):
                    if is_count:
                        state.totals[number].update(measure(document))
                    else:
                        place = state.done[number]["train_documents"]
                        self._texts.write(draw.draw(document), place)
                state.place = mark.next
                state.pending = pending.decode()
                if time.monotonic() - self._saved >= SECONDS_BETWEEN_SAVES:
                    self._save()

    def _refuse_empty_corpora(self) -> None:
        """Refuse a corpus without text, and a mixture with nothing to train on."""
        for (corpus, _), counts in zip(self._corpora, self._state.done):
            if not counts[DOCUMENTS]:
                raise UserError(f"{corpus.name}: has no text")
        if not any(counts[f"train_{DOCUMENTS}"] for counts in self._state.done):
            raise UserError("nothing is left to train on: hold-out= takes all")

    def _make_draw(self, number: int) -> Draw:
        seed = f"{self._rules.seed} {number}"
        state = self._state
        corpus, _ = self._corpora[number]
        return Draw(corpus, seed, self._rules.unit, state.totals[number], state.done[number])

    def _save(self) -> None:
        state = self._state
        state.sizes = self._texts.sync()
        self._folder.save(vars(state))
        self._saved = time.monotonic()
        read = sum(counts[BYTES] for counts in (*state.totals, *state.done))
        say(f"step {state.step} of {2 * len(self._corpora)}: {read:,} bytes")

    def _summarise(self) -> dict[str, Any]:
        return {
            "drawn": [dict(sorted(counts.items())) for counts in self._state.done],
            "outputs": {
                str(path.relative_to(self._folder.partial)): describe_file(path)
                for path in self._texts.paths
            },
        }
