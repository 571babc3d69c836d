"""Defines the options that the programs for running text share, and parses them to settings."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Optional, TypeVar

from fairseq_posenc.errors import UserError
from fairseq_posenc.tokens.symbols import (
    SPACE,
    Splitter,
    split_characters,
    split_words,
)

from .formats import LineFormat
from .output import say
from .vocabulary import Vocabulary, add_vocabulary

SPLITS = ("train", "valid", "test")
_LEAST_LONGEST_LINE = 4  # so that parts of a split line have two tokens or more
_NO_LIMIT = -1  # default of --max-symbols
_FAIRSEQS_SYMBOLS = 4  # <s>, <pad>, </s> and <unk>
Settings = TypeVar("Settings")


@dataclass(frozen=True)
class BinarizeSettings:
    """The settings of one data-bin; fields have the names of the options."""

    line_format: LineFormat  # of the corpus
    inputs: dict[str, list[str]]  # split -> files and folders
    vocabulary: Vocabulary  # files that define the tokens
    out: Path
    words: bool
    characters: bool
    keep_spaces: bool
    min_count: int
    max_symbols: int
    dict_only: bool
    sentences: bool  # whether lines are split into sentences
    # `drop` empty lines, `keep` them as items of `</s>` alone, or keep one such item between two
    # `documents`
    empty_lines: str
    longest_line: Optional[int]
    long_lines: str
    invalid_lines: str
    shard: int
    num_shards: int
    workers: int

    @classmethod
    def from_args(cls, args: argparse.Namespace, line_format: LineFormat) -> BinarizeSettings:
        """Build the settings from the options of :func:`add_arguments`.

        Raises:
            UserError: options are missing, or contradict each other.
        """
        inputs = {split: paths for split in SPLITS if (paths := getattr(args, split))}
        is_by_rule = args.words or args.characters
        vocabulary = Vocabulary.from_args(args, is_by_rule, ", or --words")
        settings = build_settings(
            cls, args, line_format=line_format, inputs=inputs, vocabulary=vocabulary
        )
        settings._check()
        has_limits = args.min_count or args.max_symbols != _NO_LIMIT
        if has_limits and not settings.makes_dictionary:
            say("note: --min-count and --max-symbols limit a new dictionary; this one is given")
        return settings

    @property
    def skips_invalid(self) -> bool:
        """Whether invalid lines are skipped; else the first one is an error."""
        return self.invalid_lines == "skip"

    @property
    def splitter(self) -> Splitter:
        """The function that splits lines into words or characters."""
        if self.characters:
            return partial(split_characters, between=SPACE if self.keep_spaces else "")
        return split_words

    @property
    def folder(self) -> Path:
        """The folder of the data-bin; a shard's name has the number of shards: shard3-of-16."""
        if self.num_shards == 1:
            return self.out
        number = f"{self.shard:0{len(str(self.num_shards - 1))}d}"
        return self.out / f"shard{number}-of-{self.num_shards}"

    @property
    def makes_dictionary(self) -> bool:
        """Whether the dictionary is made from the training text."""
        return (self.words or self.characters) and not self.vocabulary.dict_txt

    def _check(self) -> None:
        """Refuse options that are out of range or contradict each other."""
        has_train = "train" in self.inputs
        if not 0 <= self.shard < self.num_shards:
            raise UserError(f"--shard {self.shard}: shards are numbered 0 to {self.num_shards - 1}")
        if self.longest_line is not None and self.longest_line < _LEAST_LONGEST_LINE:
            raise UserError(
                f"--longest-line {self.longest_line}: give {_LEAST_LONGEST_LINE} or more"
            )
        if self.long_lines == "skip" and self.longest_line is None:
            raise UserError("--long-lines skip: give --longest-line, too")
        if self.min_count < 0:
            raise UserError(f"--min-count {self.min_count}: give 0 or more")
        if self.max_symbols != _NO_LIMIT and self.max_symbols <= _FAIRSEQS_SYMBOLS:
            least = _FAIRSEQS_SYMBOLS + 1
            raise UserError(
                f"--max-symbols {self.max_symbols}: give {least} or more, as {_FAIRSEQS_SYMBOLS} "
                "are fairseq's own; or leave it out"
            )
        if not self.inputs:
            raise UserError("nothing to do: give --train, --valid or --test")
        if self.shard and not has_train:
            raise UserError(
                f"--shard {self.shard}: give --train; only shard 0 has the sets of the others"
            )
        if self.dict_only and not (self.makes_dictionary and has_train):
            raise UserError("--dict-only counts words or characters of --train, without --dict")
        if self.makes_dictionary and not has_train:
            raise UserError("give --train, which the dictionary is made from, or --dict")
        if self.makes_dictionary and self.num_shards > 1:
            raise UserError(
                "shards need one dictionary: make it with --dict-only and without --num-shards, "
                "then give it with --dict"
            )


def add_arguments(parser: argparse.ArgumentParser, *, characters: bool = False) -> None:
    """Add the shared options; with ``characters``, all tokens are characters."""
    files = parser.add_argument_group("files")
    text = "text files, also compressed (.gz, .bz2, .xz, .zst), or folders of them"
    for split in SPLITS:
        files.add_argument(f"--{split}", nargs="+", metavar="PATH", help=text)
    files.add_argument("--out", type=Path, required=True, help="data-bin directory to make")
    files.add_argument("--dict", type=Path, help="dict.txt; needed with --encoder-json")
    _add_tokens(parser, characters)
    _add_lines(parser)
    machine = parser.add_argument_group("machines")
    add = machine.add_argument
    add("--shard", type=int, default=0, metavar="K", help="number of the shard to make, from 0")
    add("--num-shards", type=positive_int, default=1, metavar="N", help="number of shards")
    add_workers(machine)


def _add_tokens(parser: argparse.ArgumentParser, characters: bool) -> None:
    """Add the options of tokens and of a new dictionary."""
    group = parser.add_argument_group("tokens")
    add = group.add_argument
    parser.set_defaults(characters=characters, words=False, keep_spaces=False)
    parser.set_defaults(encoder_json=None, vocab_bpe=None, sentencepiece_model=None)
    if characters:
        add("--keep-spaces", action="store_true", help="write white space as the token ▁")
    else:
        add_vocabulary(group)
        add("--words", action="store_true", help="tokens are words between spaces")
    rare = "new dictionary: symbols that occur less often become <unk>"
    add("--min-count", type=int, metavar="N", default=0, help=rare)
    text = "new dictionary: its maximum size, fairseq's four symbols included (default: no limit)"
    add("--max-symbols", type=int, metavar="N", default=_NO_LIMIT, help=text)
    add("--dict-only", action="store_true", help="write only OUT/dict.txt, from --train")


def _add_lines(parser: argparse.ArgumentParser) -> None:
    """Add the options of lines: sentences, empty, long and invalid ones."""
    lines = parser.add_argument_group("lines")
    add = lines.add_argument
    add("--sentences", action="store_true", help="split lines into sentences, by rules")
    add(
        "--empty-lines",
        choices=("documents", "drop", "keep"),
        default="documents",
        help="documents: one item </s> between documents (default, except in wikitext: keep); "
        "drop, keep: as fairseq's encoder script does without and with --keep-empty",
    )
    add(
        "--longest-line",
        type=int,
        metavar="N",
        help="maximum tokens of an item, </s> included: --tokens-per-sample for a causal LM, "
        "one less for a masked LM (default: no limit)",
    )
    treatment = "treatment of longer lines (default: %(default)s)"
    add("--long-lines", choices=("split", "skip"), default="split", help=treatment)
    add_invalid_lines(lines)


def add_invalid_lines(group: argparse._ActionsContainer) -> None:
    """Add ``--invalid-lines``, the treatment of broken lines."""
    text = "treatment of lines that are not UTF-8 or not JSON (default: %(default)s)"
    choices = ("error", "skip")
    group.add_argument("--invalid-lines", choices=choices, default=choices[0], help=text)


def add_workers(group: argparse._ActionsContainer) -> None:
    """Add ``--workers``, the processes that share the work."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    text = "processes (default: all cores)"
    group.add_argument("--workers", type=positive_int, metavar="N", default=cores, help=text)


def positive_int(text: str) -> int:
    """Parse an integer of at least 1.

    Raises:
        ArgumentTypeError: the text is something else.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not '{text}'")
    return int(text)


def build_settings(cls: type[Settings], args: argparse.Namespace, **computed: Any) -> Settings:
    """Build a dataclass from the parsed options that have the names of its fields.

    Args:
        cls: the class.
        args: the parsed options.
        **computed: the other fields, and those that are not as the option says.
    """
    names = {entry.name for entry in fields(cls)}  # type: ignore[arg-type]
    parsed = {name: value for name, value in vars(args).items() if name in names}
    return cls(**{**parsed, **computed})
