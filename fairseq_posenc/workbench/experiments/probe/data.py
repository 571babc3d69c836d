"""Writes questions and answers, drawn from a fixed seed, as data of fairseq."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from fairseq.data import Dictionary
from fairseq.data.indexed_dataset import data_file_path, index_file_path, make_builder

from fairseq_posenc.tasks.answers import ASKS, BLANK
from fairseq_posenc.workbench.experiments.probe.tasks.base import Example, Task
from fairseq_posenc.workbench.experiments.variants import ENCODER_DECODER, MASKED
from fairseq_posenc.workbench.running.jobs import Outputs

QUESTION, ANSWER = "question", "answer"  # the two languages of encoder-decoders
DATA_SEED = 1
EXAMPLES = {"train": 50_000, "valid": 200}
TEST_EXAMPLES = 100  # number of questions of each length, divided equally among the depths
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)  # places of the needle in the text


def write_train_splits(task: Task, family: str, longest: int, folder: Path) -> Outputs:
    """Write the splits ``train`` and ``valid``, with lengths drawn from 1 to ``longest``."""
    for split, count in EXAMPLES.items():
        rng = _new_generator(task, split)
        examples = (task.make_example(rng, rng.randint(1, longest)) for _ in range(count))
        _write(examples, task, family, folder, split)
    return dict(EXAMPLES)


def write_test_splits(task: Task, family: str, lengths: Sequence[int], folder: Path) -> Outputs:
    """Write a test split for each length, and depth; see :func:`name_test_splits`."""
    written = {}
    for split, (length, *depth) in name_test_splits(task, lengths).items():
        rng = _new_generator(task, split)
        written[split] = TEST_EXAMPLES // (len(DEPTHS) if depth else 1)
        examples = (task.make_example(rng, length, *depth) for _ in range(written[split]))
        _write(examples, task, family, folder, split)
    return written


def name_test_splits(
    task: Task, lengths: Sequence[int]
) -> dict[str, tuple[int] | tuple[int, float]]:
    """Name the test splits; map each to its length, and to its depth if the task has depths."""
    if not task.has_depth:
        return {f"length-{length}": (length,) for length in lengths}
    return {f"length-{n}-depth-{d:g}": (n, d) for n in lengths for d in DEPTHS}


def _new_generator(task: Task, split: str) -> random.Random:
    return random.Random(f"{DATA_SEED} {task.name} {split}")


def _write(examples: Iterable[Example], task: Task, family: str, folder: Path, split: str) -> None:
    """Write a split: a file of questions with answers, or a file of each for encoder-decoders."""
    dictionary = Dictionary()
    for symbol in (ASKS, *([BLANK] if family == MASKED else []), *task.symbols):
        dictionary.add_symbol(symbol)
    names = {"": split}
    if family == ENCODER_DECODER:
        names = {symbol: f"{split}.{QUESTION}-{ANSWER}.{symbol}" for symbol in (QUESTION, ANSWER)}
    builders = {}
    for language, name in names.items():
        dictionary.save(str(folder / (f"dict.{language}.txt" if language else "dict.txt")))
        path = data_file_path(str(folder / name))
        builders[language] = make_builder(path, "mmap", vocab_size=len(dictionary))
    for question, answer in examples:
        lines = {"": [*question, ASKS, *answer], QUESTION: question, ANSWER: [ASKS, *answer]}
        for language, builder in builders.items():
            numbers = [*map(dictionary.index, lines[language]), dictionary.eos()]
            builder.add_item(torch.tensor(numbers, dtype=torch.int32))
    for language, builder in builders.items():
        builder.finalize(index_file_path(str(folder / names[language])))
