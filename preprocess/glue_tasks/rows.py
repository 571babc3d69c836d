"""Reads GLUE's .tsv files: tab-separated text without quoting, with named columns."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from binarize.sources import refuse_wide_characters
from fairseq_posenc.errors import UserError
from fairseq_posenc.tasks.glue.definitions import SCORE_MAXIMUM, Task
from fairseq_posenc.tokens.files import decode_text, read_bytes

_SUFFIXES = ("", ".gz", ".bz2", ".xz", ".zst")


class Examples(NamedTuple):
    """The examples of a file."""

    sentences: tuple[list[str], ...]  # the texts of one column, or of two for pairs
    labels: list[str]  # as in the file; empty for a test set
    ids: list[str]  # the first column, which in test files is the example's id
    broken: int  # number of rows that were left out


def find_file(folder: Path, task: Task, split: str) -> Path:
    """Find the file of a split, which may be compressed.

    Raises:
        UserError: the file is missing.
    """
    # MNLI's third test set is ../diagnostic/diagnostic.tsv, seen from its folder.
    plain = Path(os.path.normpath(folder / task.name / f"{task.files[split]}.tsv"))
    for suffix in _SUFFIXES:
        path = plain.with_name(plain.name + suffix)
        if path.is_file():
            return path
    raise UserError(
        f"{plain} is not there, nor with {', '.join(_SUFFIXES[1:])}; give the folder that has "
        "GLUE's folders (CoLA, SST-2, ...) as they are downloaded, or leave out the task or the "
        "split"
    )


def find_files(folder: Path, task: Task, splits: Sequence[str]) -> dict[str, Path]:
    """Find the files of a task by split; MNLI also has valid1, test1 and test2.

    Raises:
        UserError: a file is missing, and not optional.
    """
    files = {}
    for split in task.files:
        if split.rstrip("12") in splits:
            try:
                files[split] = find_file(folder, task, split)
            except UserError:
                if split not in task.optional:
                    raise
    return files


def read_examples(path: Path, task: Task, split: str) -> Examples:
    """Read the examples of a split.

    Raises:
        UserError: names a line that has too few columns, or a label that the task does not have.
    """
    lines = _read_lines(path)
    header: Sequence[str] = task.headless.get(split, ())
    if not header:
        _, first_line = next(lines, (1, ""))
        header = first_line.split("\t")
    columns = [_find_column(header, name, path) for name in task.sentences]
    is_labelled = split not in task.test_splits
    label_column = _find_column(header, task.label, path) if is_labelled else None
    examples = Examples(tuple([] for _ in columns), [], [], 0)
    broken = 0
    for number, line in lines:
        cells = line.split("\t")
        if len(cells) != len(header):
            if not (task.may_be_broken and is_labelled):
                raise UserError(
                    f"{path}, line {number}: {len(cells)} columns instead of {len(header)}; "
                    "mend the file, or download it again"
                )
            broken += 1
            continue
        if label_column is not None:
            line_name = f"{path}, line {number}"
            examples.labels.append(_check_label(cells[label_column], task, line_name))
        for texts, column in zip(examples.sentences, columns):
            texts.append(cells[column].strip())
        examples.ids.append(cells[0])
    if not examples.ids:
        raise UserError(f"{path} has no examples")
    return examples._replace(broken=broken)


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
                f"{line}: the score {label!r} is not between 0 and {SCORE_MAXIMUM:g}; mend the file"
            )
    elif label not in task.classes:
        raise UserError(
            f"{line}: the label {label!r} is not one of {', '.join(task.classes)}; mend the file"
        )
    return label
