"""Write questions and answers as fairseq data: deterministic, from a fixed seed."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from fairseq.data import Dictionary
from fairseq.data.indexed_dataset import data_file_path, index_file_path, make_builder

from fairseq_posenc.tasks.answers import ASKS
from fairseq_posenc.workbench.experiments.probe.tasks import Example, Task
from fairseq_posenc.workbench.experiments.variants import BOTH
from fairseq_posenc.workbench.running.stages import Outputs

QUESTION, ANSWER = "question", "answer"  # fairseq's two languages, with an encoder
DATA_SEED = 1
EXAMPLES = {"train": 50_000, "valid": 200}
TEST_EXAMPLES = 100  # of each length


def write_train_splits(task: Task, family: str, longest: int, folder: Path) -> Outputs:
    """Write the splits ``train`` and ``valid``, with lengths drawn from 1 to ``longest``."""
    for split, count in EXAMPLES.items():
        chance = _chance(task, split)
        examples = (task.example(chance, chance.randint(1, longest)) for _ in range(count))
        _write(examples, task, family, folder, split)
    return dict(EXAMPLES)


def write_test_splits(task: Task, family: str, lengths: Sequence[int], folder: Path) -> Outputs:
    """Write a test split for each length; see :func:`name_test_split`."""
    for length in lengths:
        chance = _chance(task, name_test_split(length))
        examples = (task.example(chance, length) for _ in range(TEST_EXAMPLES))
        _write(examples, task, family, folder, name_test_split(length))
    return {name_test_split(length): TEST_EXAMPLES for length in lengths}


def name_test_split(length: int) -> str:
    """Name the split with questions of a length."""
    return f"length-{length}"


def _chance(task: Task, split: str) -> random.Random:
    return random.Random(f"{DATA_SEED} {task.name} {split}")


def _write(examples: Iterable[Example], task: Task, family: str, folder: Path, split: str) -> None:
    """Write a split: a line of question and answer, or lines of both for encoder and decoder."""
    dictionary = Dictionary()
    for symbol in (ASKS, *task.symbols):
        dictionary.add_symbol(symbol)
    names = {"": split}
    if family == BOTH:
        names = {each: f"{split}.{QUESTION}-{ANSWER}.{each}" for each in (QUESTION, ANSWER)}
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
