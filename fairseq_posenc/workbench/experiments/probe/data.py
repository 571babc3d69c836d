"""Writes questions and answers, drawn from a fixed seed, as fairseq's binary files.

A sample of a language model is ``question ASKS answer </s>``. An encoder-decoder has two files: its
source is ``question </s>``, its target ``ASKS answer </s>``.
"""

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
DATA_SEED = 1  # of all splits, whatever the seeds of the models
EXAMPLES = {"train": 50_000, "valid": 200}  # number of questions by split
TEST_EXAMPLES = 100  # number of questions of each length, divided equally among the depths
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)  # places of the needle: 0 at the start, 1 at the end


def write_train_splits(task: Task, family: str, longest: int, folder: Path) -> Outputs:
    """Write the splits of ``EXAMPLES``, with lengths from 1 to ``longest``; return their sizes."""
    for split, count in EXAMPLES.items():
        rng = _new_generator(task, split)
        examples = (task.make_example(rng, rng.randint(1, longest)) for _ in range(count))
        _write(examples, task, family, folder, split)
    return dict(EXAMPLES)


def write_test_splits(task: Task, family: str, lengths: Sequence[int], folder: Path) -> Outputs:
    """Write the splits of :func:`plan_test_splits`; return their sizes."""
    splits = plan_test_splits(task, lengths)
    count = TEST_EXAMPLES // (len(DEPTHS) if task.has_depth else 1)
    for split, arguments in splits.items():
        rng = _new_generator(task, split)
        examples = (task.make_example(rng, *arguments) for _ in range(count))
        _write(examples, task, family, folder, split)
    return dict.fromkeys(splits, count)


def plan_test_splits(
    task: Task, lengths: Sequence[int]
) -> dict[str, tuple[int] | tuple[int, float]]:
    """Name the test splits, and choose the length and the depth that ``make_example`` gets."""
    if not task.has_depth:
        return {f"length-{length}": (length,) for length in lengths}
    return {f"length-{n}-depth-{depth:g}": (n, depth) for n in lengths for depth in DEPTHS}


def _new_generator(task: Task, split: str) -> random.Random:
    return random.Random(f"{DATA_SEED} {task.name} {split}")


def _write(examples: Iterable[Example], task: Task, family: str, folder: Path, split: str) -> None:
    """Write a split: for each language a file and a dictionary, as fairseq's tasks name them."""
    dictionary = Dictionary()
    blank = [BLANK] if family == MASKED else []
    for word in (ASKS, *blank, *task.words):
        dictionary.add_symbol(word)
    paths = {"": str(folder / split)}  # a language model has a language without a name
    if family == ENCODER_DECODER:
        prefix = str(folder / f"{split}.{QUESTION}-{ANSWER}.")
        paths = {language: prefix + language for language in (QUESTION, ANSWER)}
    builders = {}
    for language, path in paths.items():
        dictionary.save(str(folder / (f"dict.{language}.txt" if language else "dict.txt")))
        size = len(dictionary)
        builders[language] = make_builder(data_file_path(path), impl="mmap", vocab_size=size)
    for question, answer in examples:
        words = {"": [*question, ASKS, *answer], QUESTION: question, ANSWER: [ASKS, *answer]}
        for language, builder in builders.items():
            tokens = [*map(dictionary.index, words[language]), dictionary.eos()]
            builder.add_item(torch.tensor(tokens, dtype=torch.int32))
    for language, path in paths.items():
        builders[language].finalize(index_file_path(path))
