"""Truncates examples, and writes the splits of a GLUE task as fairseq reads them.

A sentence is stored with ``</s>`` at its end; two are joined by fairseq, as ``<s> first </s>
</s> second </s>``. The data set of a side (``input0``, ``input1``) has one item per example.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
from fairseq.data import Dictionary

from binarize.store import SIZE, Position, Store, delete_sizes
from binarize.vocabulary import Vocabulary
from fairseq_posenc.checkpoints.dictionary import DICTIONARY
from fairseq_posenc.tasks.glue.definitions import SCORE_MAXIMUM, Task
from fairseq_posenc.tokens.symbols import warn_of_unknown
from fairseq_posenc.tokens.tokenizer import Encoder, SpecialSymbols

from .rows import Examples

_BATCH_SIZE = 10_000  # examples that are encoded together


class Writer(NamedTuple):
    """Writes splits into the folder of a task."""

    folder: Path
    encoder: Encoder
    symbols: SpecialSymbols
    max_tokens: int  # maximum of an example, <s> and </s> included

    def write(self, task: Task, split: str, examples: Examples) -> dict[str, int]:
        """Write a split; return its counts."""
        counts = self._write_sentences(split, examples)
        # without the special symbols: two for each sentence
        words = counts["tokens"] - 2 * len(examples.sentences) * len(examples.ids)
        warn_of_unknown(f"{task.name} {split}", counts["unknown_tokens"], words)
        if split in task.test_splits:
            (self.folder / f"{split}.ids").write_text("\n".join(examples.ids) + "\n", "utf-8")
        elif task.regression:
            scores = [f"{float(label) / SCORE_MAXIMUM:.10g}" for label in examples.labels]
            path = self.folder / "label" / f"{split}.label"
            path.write_text("\n".join(scores) + "\n", encoding="utf-8")
        else:
            self._write_classes(task, split, examples.labels)
        return {"examples": len(examples.ids), "broken": examples.broken, **counts}

    def _write_sentences(self, split: str, examples: Examples) -> dict[str, int]:
        """Write the sentences, truncated to the maximum size; return the counts."""
        sides = range(len(examples.sentences))
        num_special = 2 * len(sides)  # <s> first </s>, and for a pair </s> second </s>
        # A data set has no longer sentences, and numpy no integer for an endless --max-tokens.
        room = min(self.max_tokens, np.iinfo(SIZE).max) - num_special
        paths = [self.folder / f"input{side}" / split for side in sides]
        stores = [Store(path, self.symbols.dtype, Position()) for path in paths]
        counts: Counter[str] = Counter(cut=0, tokens=0, unknown_tokens=0)
        longest = 0
        for start in range(0, len(examples.ids), _BATCH_SIZE):
            batch = slice(start, start + _BATCH_SIZE)
            encoded = [self.encoder.encode(texts[batch]) for texts in examples.sentences]
            # Without </s>, as is what is kept of them.
            lengths = np.stack([sizes.astype(np.int64) - 1 for _, sizes in encoded], axis=1)
            kept = truncate_lengths(lengths, room)
            for side, store in enumerate(stores):
                tokens = truncate(*encoded[side], kept[:, side])
                counts["unknown_tokens"] += int((tokens == self.symbols.unk).sum())
                store.append(tokens.tobytes(), (kept[:, side] + 1).astype(SIZE).tobytes())
            totals = kept.sum(axis=1) + num_special
            counts.update(cut=int((kept < lengths).any(axis=1).sum()), tokens=int(totals.sum()))
            longest = max(longest, int(totals.max()))
        for store in stores:
            _finish(store)
        return {**counts, "longest": longest}

    def _write_classes(self, task: Task, split: str, labels: list[str]) -> None:
        dictionary = build_label_dictionary(task)
        items = [[dictionary.index(label), dictionary.eos()] for label in labels]
        dtype = SpecialSymbols.from_dictionary(dictionary).dtype
        store = Store(self.folder / "label" / split, dtype, Position())
        store.append(np.array(items, dtype).tobytes(), np.full(len(labels), 2, SIZE).tobytes())
        _finish(store)

    def write_dictionaries(
        self, task: Task, vocabulary: Vocabulary, dictionary: Dictionary, checksums: dict[str, str]
    ) -> None:
        """Make the folders of all data sets, with their dictionaries; call it first."""
        (self.folder / "label").mkdir(exist_ok=True)
        if not task.regression:
            build_label_dictionary(task).save(str(self.folder / "label" / DICTIONARY))
        for side in range(len(task.sentences)):
            folder = self.folder / f"input{side}"
            folder.mkdir(exist_ok=True)
            vocabulary.write_dictionary(dictionary, folder / DICTIONARY, checksums)


def _finish(store: Store) -> None:
    store.finish()
    delete_sizes(store.prefix)


def build_label_dictionary(task: Task) -> Dictionary:
    """Build the dictionary of the classes in the task's order, without padding to a multiple."""
    dictionary = Dictionary()
    for label in task.classes:
        dictionary.add_symbol(label)
    return dictionary


def truncate_lengths(lengths: np.ndarray, room: int) -> np.ndarray:
    """Compute how many tokens of each sentence to keep; the longer of two is cut first.

    The result is the same as removing one token at a time from the longer sentence, or from the
    second if they are equal: of 5 and 2 tokens with room for 4, 2 and 2 are kept.

    Args:
        lengths: tokens of the sentences without special symbols, ``(N, 1)`` or ``(N, 2)``.
        room: maximum tokens of an example without special symbols.
    """
    if lengths.shape[1] == 1:
        return np.minimum(lengths, room)
    first, second = lengths.T
    second_share = room // 2  # a sentence within its share is never cut
    first_share = room - second_share
    kept_first = np.minimum(first, room - np.minimum(second, second_share))
    kept_second = np.minimum(second, room - np.minimum(first, first_share))
    return np.stack([kept_first, kept_second], axis=1)


def truncate(tokens: np.ndarray, sizes: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Truncate sentences, but keep the last token of each, ``</s>``.

    Args:
        tokens: tokens of all sentences, ``(T,)``.
        sizes: sizes of the sentences with ``</s>``, ``(N,)``.
        kept: numbers of tokens to keep, without ``</s>``, ``(N,)``.
    """
    ends = np.cumsum(sizes)
    index = np.arange(len(tokens)) - np.repeat(ends - sizes, sizes)  # in its sentence, (T,)
    is_kept = index < np.repeat(kept, sizes)
    is_kept[ends - 1] = True
    return tokens[is_kept]
