"""The options that all programs of this folder share."""

from __future__ import annotations

import argparse
from pathlib import Path

from fairseq_posenc.errors import UserError
from fairseq_posenc.running.options import Parser, add_workers, count

from . import vocabulary

SPLITS = ("train", "valid", "test")


def make_parser(description: str | None, *, characters: bool = False) -> argparse.ArgumentParser:
    """Return a parser with the shared options.

    Args:
        description: the program's docstring.
        characters: the program is for characters; otherwise its user chooses the tokens.
    """
    parser = Parser(description=description)
    files = parser.add_argument_group("files")
    for split in SPLITS:
        files.add_argument(
            f"--{split}",
            nargs="+",
            metavar="PATH",
            help="files (also .gz, .bz2, .xz, .zst), directories",
        )
    files.add_argument("--out", type=Path, required=True, help="data-bin directory to make")
    files.add_argument("--dict", type=Path, help="dict.txt; needed with --encoder-json")
    _add_tokens(parser, characters)
    _add_lines(parser)
    machine = parser.add_argument_group("machines")
    machine.add_argument("--shard", type=int, default=0, metavar="K", help="make shard K, from 0")
    machine.add_argument("--num-shards", type=count, default=1, metavar="N", help="of N shards")
    add_workers(machine)
    return parser


def _add_tokens(parser: argparse.ArgumentParser, characters: bool) -> None:
    tokens = parser.add_argument_group("tokens")
    parser.set_defaults(characters=characters, words=False, keep_spaces=False)
    parser.set_defaults(encoder_json=None, vocab_bpe=None, sentencepiece_model=None)
    if characters:
        tokens.add_argument(
            "--keep-spaces", action="store_true", help="a token ▁ for white space (default: none)"
        )
    else:
        vocabulary.add_arguments(tokens)
        tokens.add_argument("--words", action="store_true", help="what stands between spaces")
    tokens.add_argument(
        "--min-count", type=int, default=0, help="for a new dictionary: rarer symbols are <unk>"
    )
    tokens.add_argument(
        "--max-symbols", type=int, default=-1, help="for a new dictionary: its size"
    )
    tokens.add_argument(
        "--dict-only", action="store_true", help="write only OUT/dict.txt, from --train"
    )


def _add_lines(parser: argparse.ArgumentParser) -> None:
    lines = parser.add_argument_group("lines")
    lines.add_argument(
        "--sentences", action="store_true", help="cut lines into sentences, by rules"
    )
    lines.add_argument(
        "--empty-lines",
        choices=("documents", "drop", "keep"),
        default="documents",
        help="documents: one </s> of its own between documents (default, except in "
        "wikitext.py: keep); "
        "drop, keep: as fairseq's encoder script does without and with --keep-empty",
    )
    lines.add_argument(
        "--longest-line",
        type=int,
        metavar="N",
        help="items have at most N tokens, </s> included: --tokens-per-sample for a causal LM, "
        "one less for a masked LM (default: no limit)",
    )
    lines.add_argument(
        "--long-lines", choices=("split", "skip"), default="split", help="(default: %(default)s)"
    )
    add_invalid_lines(lines)


def add_invalid_lines(group: argparse._ActionsContainer) -> None:
    """Add the option that says what becomes of broken lines."""
    group.add_argument(
        "--invalid-lines",
        choices=("error", "skip"),
        default="error",
        help="lines that are not UTF-8 or not JSON (default: %(default)s)",
    )


def check(args: argparse.Namespace) -> None:
    """Refuse options that contradict each other.

    Raises:
        UserError: says which, and what to do.
    """
    counted = args.words or args.characters
    vocabulary.check(args, counted, ", or --words")
    if not 0 <= args.shard < args.num_shards:
        raise UserError(f"--shard {args.shard}: shards are numbered 0 to {args.num_shards - 1}")
    if args.longest_line is not None and args.longest_line < 4:
        raise UserError(f"--longest-line {args.longest_line}: give 4 or more")
    if not any(getattr(args, split) for split in SPLITS):
        raise UserError("nothing to do: give --train, --valid or --test")
    if args.dict_only and (not counted or args.dict or not args.train):
        raise UserError("--dict-only counts words or characters of --train, without --dict")
    if counted and not args.dict and not args.dict_only and not args.train:
        raise UserError("give --train, which the dictionary is made from, or --dict")
    if counted and not args.dict and not args.dict_only and args.num_shards > 1:
        raise UserError(
            "shards need one dictionary: make it with --dict-only, then give it with --dict"
        )
