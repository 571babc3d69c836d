"""The options that say what a model's tokens are, and the encoder that they ask for."""

from __future__ import annotations

import argparse
from pathlib import Path

from fairseq.data import Dictionary

from fairseq_posenc.errors import UserError
from fairseq_posenc.running.files import checksum
from fairseq_posenc.tokens.gpt2 import GPT2
from fairseq_posenc.tokens.numbers import load_dictionary
from fairseq_posenc.tokens.pieces import PieceEncoder, Pieces
from fairseq_posenc.tokens.tokenizer import Tokenizer

PACKAGES = ("regex", "sentencepiece", "tiktoken")  # what the numbers depend on beside the files
_FILES = ("encoder_json", "vocab_bpe", "sentencepiece_model", "dict")
_WAYS = "--encoder-json and --vocab-bpe, or --sentencepiece-model"


def add_arguments(group: argparse._ActionsContainer) -> None:
    """Add the options of GPT-2's BPE and of sentencepieces."""
    group.add_argument("--encoder-json", type=Path, help="GPT-2 BPE: its vocabulary")
    group.add_argument("--vocab-bpe", type=Path, help="GPT-2 BPE: its merges")
    group.add_argument("--sentencepiece-model", type=Path, help="sentencepieces")


def check(args: argparse.Namespace, other_way: bool = False, more: str = "") -> None:
    """Refuse options that are no vocabulary, or more than one.

    Args:
        args: the options, ``--dict`` among them.
        other_way: whether another option says what the tokens are.
        more: what the message calls such options.

    Raises:
        UserError: says what to give.
    """
    ways = [args.encoder_json, args.sentencepiece_model, other_way]
    if sum(map(bool, ways)) != 1 or bool(args.encoder_json) != bool(args.vocab_bpe):
        raise UserError(f"choose the tokens: {_WAYS}{more}")
    if args.encoder_json and not args.dict:
        raise UserError("give --dict: the dict.txt that belongs to --encoder-json")
    for name, path in _given(args).items():
        if not path.is_file():
            raise UserError(f"--{name.replace('_', '-')} {path} is not there")


def checksums(args: argparse.Namespace) -> dict[str, str]:
    """Return the SHA-256 of the files that are given, by the options' names."""
    return {name: checksum(path) for name, path in _given(args).items()}


def _given(args: argparse.Namespace) -> dict[str, Path]:
    return {name: path for name in _FILES if (path := getattr(args, name))}


def dictionary(args: argparse.Namespace) -> Dictionary:
    """Return the dictionary of ``--dict``, or that of all sentencepieces."""
    if args.dict:
        found = load_dictionary(args.dict)
        if len(found) == found.nspecial:
            raise UserError(f"--dict {args.dict} holds no symbol: all words would be <unk>")
        return found
    return Pieces(args.sentencepiece_model).dictionary()


def encoder(args: argparse.Namespace, dictionary: Dictionary) -> Tokenizer:
    """Return the encoder of GPT-2's BPE or of sentencepieces."""
    if args.encoder_json:
        return GPT2(args.encoder_json, args.vocab_bpe, dictionary)
    return PieceEncoder(Pieces(args.sentencepiece_model), dictionary)
