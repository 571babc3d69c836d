r"""Converts GLUE's .tsv files to a data-bin for each task.

  fairseq-posenc preprocess glue glue_data/ --out data-bin/glue \
      --encoder-json encoder.json --vocab-bpe vocab.bpe --dict dict.txt
  fairseq-posenc preprocess glue glue_data/ --out data-bin/glue --tasks CoLA,RTE \
      --sentencepiece-model sentencepiece.model

The dictionary must be that of the pre-trained model: RoBERTa's dict.txt, or the one in the data-bin
it was trained on. Each OUT/TASK has input0, input1 and label as fairseq's sentence_prediction reads
them, the ids of the test sets, and manifest.json with all counts. GLUE's site expects two more
sets: the diagnostic set, diagnostic/diagnostic.tsv, becomes a third test set of MNLI, whose model
predicts AX; for WNLI, which is not trained, OUT/WNLI.tsv predicts the majority class.
"""

from __future__ import annotations

import argparse
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import numpy as np
from fairseq.data import Dictionary

from binarize.options import integer
from binarize.output import Manifest, format_counts, make_folder, say
from binarize.sources import refuse_wide_characters
from binarize.vocabulary import PACKAGES, Vocabulary, add_vocabulary
from fairseq_posenc.checkpoints.dictionary import DICTIONARY
from fairseq_posenc.errors import UserError, counted
from fairseq_posenc.files import write_whole
from fairseq_posenc.folders import checksum
from fairseq_posenc.tasks.glue.definitions import SCORE_MAXIMUM, TASKS, WNLI, Task, parse_tasks
from fairseq_posenc.tokens.files import OPENERS, decode_text, read_bytes
from fairseq_posenc.tokens.subwords import Tokenizer
from fairseq_posenc.tokens.tokenizer import Encoded, token_dtype, warn_of_unknown, write_items


class Examples(NamedTuple):
    """The examples of a file."""

    sentences: tuple[list[str], ...]  # the texts of one column, or of two for pairs
    labels: list[str]  # as in the file; empty for a test set
    ids: list[str]  # the first column, which in test files is the example's id
    broken: int  # number of rows that were left out


def run(args: argparse.Namespace) -> None:
    """Write the data-bins; tasks that an interrupted run finished are kept.

    Raises:
        UserError: an option has a wrong value, or a file is missing or broken.
    """
    vocabulary = Vocabulary.from_args(args)
    tasks = parse_tasks(args.tasks)
    # Before any task is written, so that a missing file is reported at once.
    files = {task.name: find_files(args.raw, task) for task in tasks}
    dictionary = vocabulary.load_dictionary()
    writer = TaskWriter(
        vocabulary.load_tokenizer(dictionary), dictionary, vocabulary, args.max_tokens
    )
    for task in tasks:
        paths = files[task.name]
        request = {  # all that the folder's content depends on
            "options": {"max_tokens": args.max_tokens},
            "files": vocabulary.checksums(),
            "inputs": {split: checksum(path) for split, path in paths.items()},
            "packages": {name: version(name) for name in PACKAGES},  # token ids depend on these
        }
        make_folder(args.out / task.name, request, partial(writer.write_task, task, paths))
    if len(tasks) == len(TASKS) and (args.raw / WNLI.name).is_dir():  # only for a whole submission
        _predict_wnli(find_files(args.raw, WNLI), args.out / f"{WNLI.name}.tsv")


class TaskWriter(NamedTuple):
    """Writes the data-bins of tasks as fairseq reads them.

    A sentence is stored with ``</s>`` at its end; two are joined by fairseq, as ``<s> first </s>
    </s> second </s>``. The data set of a side (``input0``, ``input1``) has one item per example.
    """

    tokenizer: Tokenizer
    dictionary: Dictionary
    vocabulary: Vocabulary
    max_tokens: int  # maximum of an example, including <s> and </s>

    def write_task(self, task: Task, files: dict[str, Path], manifest: Manifest) -> None:
        """Write the data-bin of a task: its dictionaries, and the splits that are missing."""
        folder = manifest.folder
        (folder / "label").mkdir(exist_ok=True)
        if not task.regression:
            build_label_dictionary(task).save(str(folder / "label" / DICTIONARY))
        for side in range(len(task.sentences)):
            path = folder / f"input{side}" / DICTIONARY
            path.parent.mkdir(exist_ok=True)
            self.vocabulary.write_dictionary(self.dictionary, path)
        sha256 = checksum(folder / "input0" / DICTIONARY)
        manifest.entries["glue_task"] = task.name  # saved with the next split
        manifest.entries[DICTIONARY] = {"symbols": len(self.dictionary), "sha256": sha256}
        for split, path in files.items():
            if manifest.read("splits", split) is None:  # an interrupted run has not finished it
                counts = self._write_split(task, split, read_examples(path, task, split), folder)
                manifest.save("splits", split, counts)
                print(f"{task.name} {split}: {format_counts(counts)}", flush=True)

    def _write_split(
        self, task: Task, split: str, examples: Examples, folder: Path
    ) -> dict[str, int]:
        """Write a split into a folder with dictionaries; return its counts."""
        counts = self._write_sentences(split, examples, folder)
        # Without the special symbols: two for each sentence.
        text_tokens = counts["tokens"] - 2 * len(examples.sentences) * len(examples.ids)
        warn_of_unknown(f"{task.name} {split}", counts["unknown_tokens"], text_tokens)
        if split in task.test_splits:
            (folder / f"{split}.ids").write_text("\n".join(examples.ids) + "\n", "utf-8")
        elif task.regression:
            scores = [f"{float(label) / SCORE_MAXIMUM:.10g}" for label in examples.labels]
            (folder / "label" / f"{split}.label").write_text("\n".join(scores) + "\n", "utf-8")
        else:
            dictionary = build_label_dictionary(task)
            items = [[dictionary.index(label), dictionary.eos()] for label in examples.labels]
            tokens = np.array(items, token_dtype(dictionary)).ravel()
            sizes = np.full(len(items), 2, np.int32)  # a label and </s>
            write_items(folder / "label" / split, Encoded(tokens, sizes))
        return {"examples": len(examples.ids), "broken": examples.broken, **counts}

    def _write_sentences(self, split: str, examples: Examples, folder: Path) -> dict[str, int]:
        """Write the sentences, truncated to the maximum size; return the counts."""
        encoded = [self.tokenizer.encode(texts) for texts in examples.sentences]
        sides = [np.split(tokens, np.cumsum(sizes)[:-1]) for tokens, sizes in encoded]  # by item
        num_special = 2 * len(sides)  # <s> first </s>, and for a pair </s> second </s>
        counts = Counter(cut=0, tokens=0, unknown_tokens=0)
        longest = 0
        kept: list[list[np.ndarray]] = [[] for _ in sides]
        for sentences in zip(*sides):
            lengths = [len(tokens) - 1 for tokens in sentences]  # without </s>
            shown = truncate_lengths(lengths, self.max_tokens - num_special)
            for side, tokens, length in zip(kept, sentences, shown):
                side.append(np.append(tokens[:length], tokens[-1]))  # which is </s>
            counts["cut"] += int(shown != lengths)
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
    return [kept_first, min(second, room - min(first, first_share))]


def _predict_wnli(files: dict[str, Path], path: Path) -> None:
    """Write the predictions for WNLI: the majority class of its training set."""
    train = read_examples(files["train"], WNLI, "train")
    test = read_examples(files["test"], WNLI, "test")
    ((label, count),) = Counter(train.labels).most_common(1)
    rows = "".join(f"{number}\t{label}\n" for number in test.ids)
    write_whole(path, f"index\tprediction\n{rows}")
    say(f"wrote {path}: {label} for all, the label of {count:,} of {len(train.labels):,}")


def find_file(folder: Path, task: Task, split: str) -> Path:
    """Find the file of a split, which may be compressed.

    Raises:
        UserError: the file is missing.
    """
    # MNLI's third test set is ../diagnostic/diagnostic.tsv, seen from its folder.
    plain = Path(os.path.normpath(folder / task.name / f"{task.files[split]}.tsv"))
    for suffix in ("", *OPENERS):
        path = plain.with_name(plain.name + suffix)
        if path.is_file():
            return path
    raise UserError(
        f"{plain} does not exist, nor with {', '.join(OPENERS)}; give the folder that has "
        "GLUE's folders (CoLA, SST-2, ...) as they are downloaded, or fewer --tasks"
    )


def find_files(folder: Path, task: Task) -> dict[str, Path]:
    """Find the files of a task by split: train, valid and test; MNLI also has valid1, test1, test2.

    Raises:
        UserError: a file is missing, and not optional.
    """
    files = {}
    for split in task.files:
        # Of MNLI, the diagnostic set is optional.
        with suppress(UserError) if split in task.optional else nullcontext():
            files[split] = find_file(folder, task, split)
    return files


def read_examples(path: Path, task: Task, split: str) -> Examples:
    """Read the examples of a split.

    Raises:
        UserError: names a line that has too few columns, or a label that the task does not have.
    """
    lines = _read_lines(path)
    is_labeled = split not in task.test_splits
    header: Sequence[str] = task.headless if is_labeled else ()  # of a file without a header line
    if not header:
        _, first_line = next(lines, (1, ""))
        header = first_line.split("\t")
    columns = [_find_column(header, name, path) for name in task.sentences]  # one, or two
    label_column = _find_column(header, task.label, path) if is_labeled else None
    sentences: tuple[list[str], ...] = tuple([] for _ in columns)
    labels, ids, broken = [], [], 0
    for number, line in lines:
        cells = line.split("\t")
        if len(cells) != len(header):
            if not (task.may_be_broken and is_labeled):  # only QQP's labeled files
                fault = f"{counted(len(cells), 'columns')} instead of {len(header)}"
                advice = "fix the file, or download it again"
                raise UserError(f"{path}, line {number}: {fault}; {advice}")
            broken += 1
            continue
        if label_column is not None:
            labels.append(_check_label(cells[label_column], task, f"{path}, line {number}"))
        for texts, column in zip(sentences, columns):
            texts.append(cells[column].strip())
        ids.append(cells[0])
    if not ids:
        raise UserError(f"{path} has no examples")
    return Examples(sentences, labels, ids, broken)


def _read_lines(path: Path) -> Iterator[tuple[int, str]]:
    r"""Yield numbered lines; they end only at ``\n``, as texts contain other line separators."""
    content = read_bytes(path)
    refuse_wide_characters(content, str(path))
    # `decode_text` also drops a byte-order mark; MRPC begins with one.
    for number, line in enumerate(decode_text(content, str(path)).split("\n"), start=1):
        if line.strip():
            yield number, line.rstrip("\r")


def _find_column(header: Sequence[str], name: str, path: Path) -> int:
    if name not in header:
        raise UserError(
            f"{path}, line 1: no column is called '{name}' ({', '.join(header)}); "
            "download the file again"
        )
    return list(header).index(name)


def _check_label(label: str, task: Task, line: str) -> str:
    """Check that a label is a class or a score of the task; return it without white space."""
    label = label.strip()
    if task.regression:
        try:
            score = float(label)
        except ValueError:
            score = math.nan
        if not 0 <= score <= SCORE_MAXIMUM:
            raise UserError(
                f"{line}: the score {label!r} is not between 0 and {SCORE_MAXIMUM:g}; fix the file"
            )
    elif label not in task.classes:
        raise UserError(
            f"{line}: the label {label!r} is not one of {', '.join(task.classes)}; fix the file"
        )
    return label


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("raw", type=Path, help="folder with CoLA/train.tsv and so on; also .gz, .bz2, .xz")
    add("--out", type=Path, required=True, help="folder to make, with a folder for each task")
    add("--tasks", default="all", help="tasks, separated by commas (default: all eight)")
    add_vocabulary(parser)
    add("--dict", type=Path, help="dict.txt of the pre-trained model; needed with --encoder-json")
    text = (
        "maximum tokens of an example, <s> and </s> included: the model's positions; longer "
        "ones are cut, the longer sentence first, and counted (default: %(default)s)"
    )
    # At least four special symbols of a pair, and two tokens of each sentence.
    add("--max-tokens", type=integer(8), default=512, metavar="N", help=text)
