"""Truncates examples, and writes the splits of a GLUE task as fairseq reads them.

A sentence is stored with ``</s>`` at its end; two are joined by fairseq, as ``<s> first </s>
</s> second </s>``. The data set of a side (``input0``, ``input1``) has one item per example.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from fairseq.data import Dictionary

from binarize.vocabulary import Vocabulary
from fairseq_posenc.checkpoints.dictionary import DICTIONARY
from fairseq_posenc.tasks.glue.definitions import SCORE_MAXIMUM, Task
from fairseq_posenc.tokens.data_set import write_items
from fairseq_posenc.tokens.symbols import warn_of_unknown
from fairseq_posenc.tokens.tokenizer import Encoded, Encoder, token_dtype

from .rows import Examples


class SplitWriter(NamedTuple):
    """Writes splits into the folders of tasks."""

    encoder: Encoder
    dictionary: Dictionary
    vocabulary: Vocabulary
    max_tokens: int  # maximum of an example, <s> and </s> included

    def write_dictionaries(self, task: Task, folder: Path) -> None:
        """Make the folders of a task's data sets, with their dictionaries."""
        (folder / "label").mkdir(exist_ok=True)
        if not task.regression:
            build_label_dictionary(task).save(str(folder / "label" / DICTIONARY))
        for side in range(len(task.sentences)):
            (folder / f"input{side}").mkdir(exist_ok=True)
            self.vocabulary.write_dictionary(self.dictionary, folder / f"input{side}" / DICTIONARY)

    def write(self, task: Task, split: str, examples: Examples, folder: Path) -> dict[str, int]:
        """Write a split into a folder with dictionaries; return its counts."""
        counts = self._write_sentences(split, examples, folder)
        # without the special symbols: two for each sentence
        words = counts["tokens"] - 2 * len(examples.sentences) * len(examples.ids)
        warn_of_unknown(f"{task.name} {split}", counts["unknown_tokens"], words)
        if split in task.test_splits:
            (folder / f"{split}.ids").write_text("\n".join(examples.ids) + "\n", "utf-8")
        elif task.regression:
            scores = [f"{float(label) / SCORE_MAXIMUM:.10g}" for label in examples.labels]
            path = folder / "label" / f"{split}.label"
            path.write_text("\n".join(scores) + "\n", encoding="utf-8")
        else:
            dictionary = build_label_dictionary(task)
            items = [[dictionary.index(label), dictionary.eos()] for label in examples.labels]
            tokens = np.array(items, token_dtype(dictionary)).ravel()
            sizes = np.full(len(items), 2, np.int32)
            write_items(folder / "label" / split, Encoded(tokens, sizes))
        return {"examples": len(examples.ids), "broken": examples.broken, **counts}

    def _write_sentences(self, split: str, examples: Examples, folder: Path) -> dict[str, int]:
        """Write the sentences, truncated to the maximum size; return the counts."""
        encoded = [self.encoder.encode(texts) for texts in examples.sentences]
        sides = [np.split(tokens, np.cumsum(sizes)[:-1]) for tokens, sizes in encoded]
        num_special = 2 * len(sides)  # <s> first </s>, and for a pair </s> second </s>
        counts = Counter(cut=0, tokens=0, unknown_tokens=0)
        longest = 0
        kept: list[list[np.ndarray]] = [[] for _ in sides]
        for sentences in zip(*sides):
            lengths = [len(tokens) - 1 for tokens in sentences]  # without </s>
            shown = truncate_lengths(lengths, self.max_tokens - num_special)
            for side, tokens, length in zip(kept, sentences, shown):
                side.append(np.append(tokens[:length], tokens[-1]))
            counts["cut"] += shown != lengths
            counts["tokens"] += sum(shown) + num_special
            longest = max(longest, sum(shown) + num_special)
        for number, items in enumerate(kept):
            tokens = np.concatenate(items)
            sizes = np.array([len(item) for item in items], np.int32)
            write_items(folder / f"input{number}" / split, Encoded(tokens, sizes))
            counts["unknown_tokens"] += int((tokens == self.dictionary.unk()).sum())
        return {**counts, "longest": longest}


def build_label_dictionary(task: Task) -> Dictionary:
    """Build the dictionary of the classes in the task's order, without padding to a multiple."""
    dictionary = Dictionary()
    for label in task.classes:
        dictionary.add_symbol(label)
    return dictionary


def truncate_lengths(lengths: Sequence[int], room: int) -> list[int]:
    """Compute how many tokens of each sentence to keep; the longer of two is cut first.

    The result is the same as removing one token at a time from the longer sentence, or from the
    second if they are equal: of 5 and 2 tokens with room for 4, 2 and 2 are kept.

    Args:
        lengths: tokens of one or two sentences without special symbols.
        room: maximum tokens of an example without special symbols.
    """
    if len(lengths) == 1:
        return [min(lengths[0], room)]
    first, second = lengths
    second_share = room // 2  # a sentence within its share is never cut
    first_share = room - second_share
    kept_first = min(first, room - min(second, second_share))
    kept_second = min(second, room - min(first, first_share))
    return [kept_first, kept_second]
