"""One split of a data-bin (train, valid or test): its files, through the workers, to the disk."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable

import numpy as np

from fairseq_posenc.errors import UserError
from fairseq_posenc.running.files import checksum
from fairseq_posenc.running.progress import say
from fairseq_posenc.tokens.numbers import Symbols

from .items import Items, describe_invalid
from .pool import Pool
from .sources import Input, Mark, Place, read_chunks
from .store import SIZE, Position, Store

SECONDS_BETWEEN_SAVES = 10.0
_SHOWN = 10  # messages about invalid lines; the counts are complete


@dataclass
class State:
    """How far a split is; everything before it is safely on disk.

    Attributes:
        place: where the next chunk begins.
        position: of the data set.
        document_ended: whether an empty item is due before the next item.
        counts: of the whole split so far.
        part_lines: of each part that is done, how many lines it has.
        messages: about the first invalid lines.
    """

    place: Place = field(default_factory=Place)
    position: Position = field(default_factory=Position)
    document_ended: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    part_lines: list[int] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, saved: dict[str, Any]) -> State:
        """Return a state that was saved as JSON."""
        place, position = Place(*saved["place"]), Position(*saved["position"])
        counts = Counter(saved["counts"])
        return cls(**{**saved, "place": place, "position": position, "counts": counts})

    def to_json(self) -> dict[str, Any]:
        """Return the state as JSON can hold it."""
        return dict(vars(self))


class Split:
    """Writes one split, from the beginning or from a saved state.

    Args:
        prefix: path of the data set without ending.
        inputs: what it is made of.
        symbols: of the dictionary.
        documents: whether documents, and so files, are set apart by an empty item.
        skip_invalid: leave invalid lines out and count them, instead of stopping at the first.
        state: where to go on.
        save: called now and then with the state, to be brought to the disk.
    """

    def __init__(
        self,
        prefix: Path,
        inputs: Sequence[Input],
        symbols: Symbols,
        documents: bool,
        skip_invalid: bool,
        state: State,
        save: Callable[[State], None],
    ) -> None:
        self._inputs, self._documents, self._skip_invalid = inputs, documents, skip_invalid
        self._state, self._save, self._saved = state, save, time.monotonic()
        self._store = Store(prefix, symbols.dtype, state.position)
        self._end = np.array([symbols.eos], symbols.dtype).tobytes()
        self._one = np.array([1], SIZE).tobytes()
        self._prefix = prefix

    def write(self, pool: Pool) -> dict[str, Any]:
        """Write what is left of the split and return what the manifest says about it.

        Raises:
            UserError: a line is invalid, or there is no text.
        """
        try:
            for mark, items in pool.map(read_chunks(self._inputs, self._state.place)):
                self._check(items, mark)
                self._append(items)
                self._advance(mark)
                if time.monotonic() - self._saved >= SECONDS_BETWEEN_SAVES:
                    self._save_state()
            if not self._store.position.items:
                raise UserError(f"{self._prefix.name}: nothing is left of its text")
            self._store.finish()
        finally:
            self._store.close()
        return self._summary()

    def _advance(self, mark: Mark) -> None:
        state = self._state
        if mark.is_last:
            state.part_lines.append(mark.place.line)
            state.document_ended = True
        state.place = mark.next

    def _append(self, items: Items) -> None:
        state = self._state
        state.counts.update(items.counts)
        state.document_ended |= items.begins_document
        if not items.sizes:
            return
        if self._documents and state.document_ended and self._store.position.items:
            self._store.append(self._end, self._one)
            state.counts.update(items=1, tokens=1, document_ends=1)
        self._store.append(items.tokens, items.sizes)
        state.document_ended = items.ends_document

    def _check(self, items: Items, mark: Mark) -> None:
        part = self._inputs[mark.place.part].part
        if items.counts["lines"] != mark.lines:
            raise RuntimeError(f"{part}: {items.counts['lines']} of {mark.lines} lines came back")
        for message in describe_invalid(items.invalid, part.path, self._state.place.line):
            where = f"{message} (counted from byte {part.start})" if part.start else message
            if not self._skip_invalid:
                raise UserError(f"{where}; mend the file, or use --invalid-lines skip")
            if len(self._state.messages) < _SHOWN:
                self._state.messages.append(where)
                say(f"skipped {where}")

    def _save_state(self) -> None:
        self._state.position = self._store.sync()
        self._save(self._state)
        self._saved = time.monotonic()

    def _summary(self) -> dict[str, Any]:
        counts, position = self._state.counts, self._store.position
        if (counts["items"], counts["tokens"]) != position:
            raise RuntimeError(f"{self._prefix}: {position} were written, but counted: {counts}")
        outputs = [self._prefix.with_suffix(suffix) for suffix in (".bin", ".idx")]
        return {
            "counts": dict(sorted(counts.items())),
            "invalid_lines": self._state.messages,
            "inputs": [
                {**part._asdict(), "lines": lines, "sha256": found}
                for (part, found), lines in zip(self._inputs, self._state.part_lines)
            ],
            "outputs": {
                path.name: {"bytes": path.stat().st_size, "sha256": checksum(path)}
                for path in outputs
            },
        }
