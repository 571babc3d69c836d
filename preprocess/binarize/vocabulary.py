"""Defines the options of BPE and sentencepieces; loads vocabularies, and writes dictionaries."""

from __future__ import annotations

import argparse
import codecs
import shutil
from pathlib import Path
from typing import NamedTuple

from fairseq.data import Dictionary

from fairseq_posenc.checkpoints.dictionary import load_dictionary
from fairseq_posenc.errors import UserError
from fairseq_posenc.files import written_whole
from fairseq_posenc.folders import checksum
from fairseq_posenc.tokens.subwords import GPT2, PieceEncoder, Pieces, Tokenizer

PACKAGES = ("regex", "sentencepiece")  # the token ids depend on their versions, too
_OPTIONS = ("encoder_json", "vocab_bpe", "sentencepiece_model", "dict")


def add_vocabulary(group: argparse._ActionsContainer) -> None:
    """Add the options of BPE and sentencepieces; not ``--dict``, which only some programs need."""
    group.add_argument("--encoder-json", type=Path, help="vocabulary of GPT-2's BPE")
    group.add_argument("--vocab-bpe", type=Path, help="merges of GPT-2's BPE")
    group.add_argument("--sentencepiece-model", type=Path, help="sentencepiece model")


class Vocabulary(NamedTuple):
    """The files that define a model's tokens."""

    files: dict[str, Path]  # by the names of the options that were given, such as `encoder_json`

    @classmethod
    def from_args(
        cls, args: argparse.Namespace, is_by_rule: bool = False, alternatives: str = ""
    ) -> Vocabulary:
        """Build the vocabulary from the parsed options, with ``--dict``.

        ``is_by_rule`` is True if the tokens are words or characters, which need no file.
        ``alternatives`` ends the message that asks for a choice: ", or --words".

        Raises:
            UserError: the options name no vocabulary, more than one, or what is not a file.
        """
        # A program may lack options: for characters, only --dict is added.
        files = {name: path for name in _OPTIONS if (path := getattr(args, name, None))}
        is_bpe = "encoder_json" in files
        chosen = [is_bpe, "sentencepiece_model" in files, is_by_rule]  # kinds of tokens
        if sum(chosen) != 1 or is_bpe != ("vocab_bpe" in files):
            raise UserError(
                "choose the tokens: --encoder-json and --vocab-bpe, or --sentencepiece-model"
                + alternatives
            )
        if is_bpe and "dict" not in files:
            raise UserError("give --dict: the dict.txt that belongs to --encoder-json")
        for name, path in files.items():
            if not path.is_file():
                why = "is not a file" if path.exists() else "does not exist"
                raise UserError(f"--{name.replace('_', '-')} {path} {why}; name another")
        return cls(files)

    def checksums(self) -> dict[str, str]:
        """Compute the SHA-256 of the files, by the options' names."""
        return {name: checksum(path) for name, path in self.files.items()}

    def load_dictionary(self) -> Dictionary:
        """Load the dictionary of ``--dict``, or build one of all sentencepieces.

        Raises:
            UserError: the file cannot be read, has no symbol, or begins with a byte-order mark.
        """
        path = self.files.get("dict")
        if path is None:  # sentencepieces; for words and characters, `command.py` counts the text
            return Pieces(self.files["sentencepiece_model"]).build_dictionary()
        dictionary = load_dictionary(path, mask=False)  # tasks of masked LMs add <mask>
        if len(dictionary) == dictionary.nspecial:
            raise UserError(f"--dict {path} contains no symbols: all words would be <unk>")
        if path.read_bytes().startswith(codecs.BOM_UTF8):
            raise UserError(
                f"--dict {path}, line 1: begins with a byte-order mark, which fairseq takes for a "
                "part of the first word; save it as UTF-8 without one"
            )
        return dictionary

    def write_dictionary(self, dictionary: Dictionary, path: Path) -> None:
        """Write the dictionary of :meth:`load_dictionary`; a file of ``--dict`` is copied."""
        if "dict" in self.files:
            with written_whole(path) as new:
                shutil.copyfile(self.files["dict"], new)
        else:
            save_dictionary(dictionary, path)

    def load_tokenizer(self, dictionary: Dictionary) -> Tokenizer:
        """Load GPT-2's BPE or the sentencepieces."""
        if "encoder_json" in self.files:
            return GPT2(self.files["encoder_json"], self.files["vocab_bpe"], dictionary)
        return PieceEncoder(Pieces(self.files["sentencepiece_model"]), dictionary)


def save_dictionary(dictionary: Dictionary, path: Path) -> None:
    """Write a dictionary to a file; a kill leaves no part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(path) as new:
        dictionary.save(str(new))
