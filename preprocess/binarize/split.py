"""Writes one split of a data-bin (train, valid or test); an interrupted one continues by part.

A split is a data set of fairseq; its items are the samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fairseq_posenc.errors import UserError
from fairseq_posenc.tokens.tokenizer import SpecialSymbols

from .items import Items, skip_or_refuse
from .options import BinarizeSettings
from .output import Manifest, describe_file, say
from .pool import Pool
from .shards import Input
from .sources import read_chunks
from .store import SIZE, Position, Store, delete_sizes

_MAX_REPORTED = 10  # invalid lines; all are counted


@dataclass
class SplitProgress:
    """The entry of a split in the manifest; everything in it is synced to disk."""

    inputs: list[dict[str, Any]] = field(default_factory=list)  # the finished parts
    position: Sequence[int] = Position()  # end of their items
    document_ended: bool = False  # whether an empty item must precede the next item
    counts: Counter[str] = field(default_factory=Counter)
    invalid_lines: list[str] = field(default_factory=list)  # messages about the first ones
    outputs: dict[str, Any] = field(default_factory=dict)  # the files, once all parts are finished


def write_split(
    name: str,
    inputs: Sequence[Input],
    symbols: SpecialSymbols,
    settings: BinarizeSettings,
    manifest: Manifest,
    pool: Pool,
) -> dict[str, Any]:
    """Write a split, from the first part that is not finished; return its entry of the manifest.

    Raises:
        UserError: a line is invalid, or the text is empty.
    """
    progress = SplitProgress(**(manifest.read("splits", name) or {}))
    progress.counts = Counter(progress.counts)
    prefix = manifest.folder / name
    if not progress.outputs:
        store = Store(prefix, symbols.dtype, Position(*progress.position))
        try:
            writer = _Writer(store, progress, symbols, settings.empty_lines == "documents")
            for chunk, items in pool.map(read_chunks(inputs, len(progress.inputs))):
                if items.counts["lines"] != chunk.lines:
                    raise RuntimeError(f"{chunk}: {items.counts['lines']} lines came back")
                for message in skip_or_refuse(items.invalid, inputs, chunk, settings.skips_invalid):
                    if len(progress.invalid_lines) < _MAX_REPORTED:
                        progress.invalid_lines.append(message)
                        say(f"skipped {message}")
                writer.append(items)
                if chunk.ends_part:
                    part, digest = inputs[chunk.part]
                    finished = {**part._asdict(), "lines": chunk.end_line, "sha256": digest}
                    progress.inputs.append(finished)
                    progress.document_ended = True
                    progress.position = store.sync()
                    manifest.save("splits", name, vars(progress))
                    say(f"{name}: {progress.counts['tokens']:,} tokens")
            if not store.position.items:
                raise UserError(f"{name}: no line of its text is left")
            store.finish()
        finally:
            store.close()
        counts = progress.counts
        if store.position != Position(counts["items"], counts["tokens"]):
            raise RuntimeError(f"{prefix}: {store.position} written, but counted: {counts}")
        progress.counts = Counter(dict(sorted(counts.items())))
        files = [prefix.with_suffix(suffix) for suffix in (".bin", ".idx")]
        progress.outputs = {path.name: describe_file(path) for path in files}
        manifest.save("splits", name, vars(progress))
    delete_sizes(prefix)
    return vars(progress)


@dataclass
class _Writer:
    """Appends the items of chunks, with an empty item between documents."""

    store: Store
    progress: SplitProgress
    symbols: SpecialSymbols
    separates_documents: bool

    def append(self, items: Items) -> None:
        """Append the items of a chunk, after an empty item if a document ended before them."""
        progress = self.progress
        progress.counts.update(items.counts)
        progress.document_ended |= items.begins_with_blank
        if not items.sizes:
            return
        if self.separates_documents and progress.document_ended and self.store.position.items:
            end = np.array([self.symbols.eos], self.symbols.dtype)
            self.store.append(end.tobytes(), np.array([1], SIZE).tobytes())
            progress.counts.update(items=1, tokens=1, document_ends=1)
        self.store.append(items.tokens, items.sizes)
        progress.document_ended = items.ends_with_blank
