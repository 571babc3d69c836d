"""Defines the options that the programs for running text share, and turns them into settings."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Optional

from fairseq_posenc.errors import UserError
from fairseq_posenc.tokens.tokenizer import SPACE, Splitter, split_characters, split_words

from .formats import LineFormat
from .vocabulary import Vocabulary, add_vocabulary

SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class BinarizeSettings:
    """The settings of one data-bin; fields have the names of the options."""

    line_format: LineFormat  # of the corpus
    inputs: dict[str, list[str]]  # split -> files and folders
    vocabulary: Vocabulary  # files that define the tokens
    out: Path
    words: bool  # tokens are words between spaces
    characters: bool  # tokens are characters; with neither, `vocabulary` has them
    keep_spaces: bool  # of characters: write white space as the token ▁, instead of dropping it
    min_count: int  # of a symbol in a new dictionary; 0: all are kept
    max_symbols: int  # of a new dictionary; -1: no limit
    sentences: bool  # whether lines are split into sentences
    # `drop` them, `keep` each as an item `</s>`, or write one such item between two `documents`
    empty_lines: str
    longest_line: Optional[int]  # maximum tokens of an item; None: no limit
    invalid_lines: str  # `skip` invalid lines, or `error`: stop at the first
    workers: int

    @classmethod
    def from_args(cls, args: argparse.Namespace, line_format: LineFormat) -> BinarizeSettings:
        """Build the settings from the options of :func:`add_arguments`.

        Raises:
            UserError: options are missing, or contradict each other.
        """
        others = ("line_format", "inputs", "vocabulary")  # all further fields are options, by name
        settings = cls(
            line_format=line_format,
            inputs={split: paths for split in SPLITS if (paths := getattr(args, split))},
            vocabulary=Vocabulary.from_args(
                args,  # options that a program lacks count as not given
                is_by_rule=args.words or args.characters,
                alternatives=", or --words",  # ends the message if no tokens were chosen
            ),
            **{x.name: getattr(args, x.name) for x in fields(cls) if x.name not in others},
        )
        settings._refuse_contradictions()
        return settings

    @property
    def splitter(self) -> Splitter:
        """The function that splits lines into words or characters."""
        if self.characters:
            return partial(split_characters, between=SPACE if self.keep_spaces else "")
        return split_words

    @property
    def makes_dictionary(self) -> bool:
        """Whether the dictionary is made from the training text."""
        return (self.words or self.characters) and "dict" not in self.vocabulary.files

    def _refuse_contradictions(self) -> None:
        """Refuse options that contradict each other."""
        if not self.inputs:
            raise UserError("nothing to do: give --train, --valid or --test")
        if "train" not in self.inputs and self.makes_dictionary:
            raise UserError("give --train, which the dictionary is made from, or --dict")
        if (self.min_count or self.max_symbols > 0) and not self.makes_dictionary:
            raise UserError("--min-count and --max-symbols are for a new dictionary: omit them")


def add_arguments(parser: argparse.ArgumentParser, *, characters: bool = False) -> None:
    """Add the shared options; with ``characters``, all tokens are characters."""
    add = parser.add_argument_group("files").add_argument
    text = "text files, also compressed (.gz, .bz2, .xz), or folders of them"
    for split in SPLITS:
        add(f"--{split}", nargs="+", action="extend", metavar="PATH", help=text)
    add("--out", type=Path, required=True, help="data-bin folder to make")
    add("--dict", type=Path, help="dict.txt; needed with --encoder-json")
    tokens = parser.add_argument_group("tokens")
    add = tokens.add_argument
    # `from_args` reads all three; these are the values of those that a program does not offer.
    parser.set_defaults(characters=characters, words=False, keep_spaces=False)
    if characters:
        add("--keep-spaces", action="store_true", help="write white space as the token ▁")
    else:
        add_vocabulary(tokens)
        add("--words", action="store_true", help="tokens are words between spaces")
    text = "new dictionary: symbols that occur less often become <unk>"
    add("--min-count", type=integer(0), metavar="N", default=0, help=text)
    text = "new dictionary: its maximum size, fairseq's four symbols included (default: no limit)"
    add("--max-symbols", type=integer(5), metavar="N", default=-1, help=text)
    lines = parser.add_argument_group("lines")
    add = lines.add_argument
    add("--sentences", action="store_true", help="split lines into sentences, by rules")
    text = (
        "documents: one item </s> between documents (default, except in wikitext: keep); "
        "drop, keep: as fairseq's encoder script does without and with --keep-empty"
    )
    add("--empty-lines", choices=("documents", "drop", "keep"), default="documents", help=text)
    text = (
        "maximum tokens of an item, </s> included: --tokens-per-sample for a causal LM, one less "
        "for a masked LM; longer ones are split (default: no limit)"
    )
    # From 3 on, no part of a split line is `</s>` alone, which would end a document; 4 is a margin.
    add("--longest-line", type=integer(4), metavar="N", help=text)
    add_invalid_lines(lines)
    add_workers(parser)


def add_invalid_lines(group: argparse._ActionsContainer) -> None:
    """Add ``--invalid-lines``, the treatment of broken lines."""
    text = "treatment of lines that are not UTF-8 or not JSON (default: %(default)s)"
    group.add_argument("--invalid-lines", choices=("error", "skip"), default="error", help=text)


def add_workers(group: argparse._ActionsContainer) -> None:
    """Add ``--workers``, the processes that share the work."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    text, number = "processes (default: all cores)", integer(1, 1024)
    group.add_argument("--workers", type=number, metavar="N", default=cores or 1, help=text)


def integer(least: int, most: float = math.inf) -> Callable[[str], int]:
    """Create a type for argparse: an integer from ``least`` to ``most``."""

    def parse(text: str) -> int:
        number = int(text[:99]) if text.isdecimal() else -1  # Python refuses thousands of digits
        if not least <= number <= most:
            bound = f"at most {most:,}" if number > most else f"a whole number of at least {least}"
            raise argparse.ArgumentTypeError(f"must be {bound}, not '{text}'")
        return number

    return parse
