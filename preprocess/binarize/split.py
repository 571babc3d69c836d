"""Writes one split of a data-bin (train, valid or test), and resumes an unfinished one.

A split is a data set of fairseq; its items are the samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.running.folders import WholeFolder
from fairseq_posenc.workbench.running.progress import say
from fairseq_posenc.workbench.tokens.tokenizer import SpecialSymbols

from .items import Items, skip_or_refuse
from .options import BinarizeSettings
from .pool import Pool
from .shards import Input, describe_file
from .sources import Chunk, Place, read_chunks
from .store import SIZE, Position, Store

_MAX_REPORTED = 10  # invalid lines; all are counted


@dataclass
class SplitState:
    """Progress of a split; everything before it is synced to disk."""

    place: Place = field(default_factory=Place)  # beginning of the next chunk
    position: Position = field(default_factory=Position)  # end of the written items
    document_ended: bool = False  # whether an empty item must precede the next item
    counts: Counter[str] = field(default_factory=Counter)
    part_lines: list[int] = field(default_factory=list)  # number of lines of each finished part
    messages: list[str] = field(default_factory=list)  # about the first invalid lines

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> SplitState:
        """Build a state from its ``vars``, saved as JSON."""
        place, position = Place(*saved["place"]), Position(*saved["position"])
        counts = Counter(saved["counts"])
        return cls(**{**saved, "place": place, "position": position, "counts": counts})


class Split:
    """Writes one split into a folder, from the beginning or from the state of an earlier run.

    ``done`` is the progress of the folder, in which the state has the split's name. The state is
    saved every few seconds, but not after the last item.
    """

    def __init__(
        self,
        name: str,
        inputs: Sequence[Input],
        symbols: SpecialSymbols,
        settings: BinarizeSettings,
        folder: WholeFolder,
        done: dict[str, Any],
    ) -> None:
        self._name, self._folder, self._done = name, folder, done
        self._inputs = inputs
        self._skip_invalid = settings.skips_invalid
        self._separates_documents = settings.empty_lines == "documents"  # by an empty item
        self._state = SplitState.from_json(done[name]) if name in done else SplitState()
        self._prefix = folder.partial / name
        self._store = Store(self._prefix, symbols.dtype, self._state.position)
        # An empty item: its only token, and its size.
        self._empty = (
            np.array([symbols.eos], symbols.dtype).tobytes(),
            np.array([1], SIZE).tobytes(),
        )

    @staticmethod
    def is_done(name: str, done: dict[str, Any]) -> bool:
        """Check whether ``done`` has the result of a split, not only a state."""
        return "outputs" in done.get(name, {})

    def write(self, pool: Pool) -> dict[str, Any]:
        """Write the rest of the split; return its entry of the manifest.

        Raises:
            UserError: a line is invalid, or the text is empty.
        """
        try:
            for chunk, items in pool.map(read_chunks(self._inputs, self._state.place)):
                if items.counts["lines"] != chunk.lines:
                    raise RuntimeError(f"{chunk}: {items.counts['lines']} lines came back")
                self._report_invalid(items, chunk)
                self._append(items)
                if chunk.ends_part:
                    self._state.part_lines.append(chunk.end.line)
                    self._state.document_ended = True
                self._state.place = chunk.next_place
                if self._folder.is_save_due:
                    self._save()
            if not self._store.position.items:
                raise UserError(f"{self._name}: no line of its text is left")
            self._store.finish()
        finally:
            self._store.close()
        return self._summarise()

    def _save(self) -> None:
        self._state.position = self._store.sync()
        self._folder.save({**self._done, self._name: vars(self._state)})
        say(f"{self._name}: {self._state.counts['tokens']:,} tokens")

    def _append(self, items: Items) -> None:
        """Append the items of a chunk, after an empty item if a document ended before them."""
        state = self._state
        state.counts.update(items.counts)
        state.document_ended |= items.begins_with_blank
        if not items.sizes:
            return
        if self._separates_documents and state.document_ended and self._store.position.items:
            self._store.append(*self._empty)
            state.counts.update(items=1, tokens=1, document_ends=1)
        self._store.append(items.tokens, items.sizes)
        state.document_ended = items.ends_with_blank

    def _report_invalid(self, items: Items, chunk: Chunk) -> None:
        """Report the invalid lines of a chunk, or refuse them."""
        for message in skip_or_refuse(items.invalid, self._inputs, chunk, self._skip_invalid):
            if len(self._state.messages) < _MAX_REPORTED:
                self._state.messages.append(message)
                say(f"skipped {message}")

    def _summarise(self) -> dict[str, Any]:
        """Build the manifest's entry of the split, and check its counts."""
        counts, position = self._state.counts, self._store.position
        if position != Position(counts["items"], counts["tokens"]):
            raise RuntimeError(f"{self._prefix}: {position} were written, but counted: {counts}")
        outputs = [self._prefix.with_suffix(suffix) for suffix in (".bin", ".idx")]
        return {
            "counts": dict(sorted(counts.items())),
            "invalid_lines": self._state.messages,
            "inputs": [
                {**part._asdict(), "lines": lines, "sha256": digest}
                for (part, digest), lines in zip(self._inputs, self._state.part_lines)
            ],
            "outputs": {path.name: describe_file(path) for path in outputs},
        }
