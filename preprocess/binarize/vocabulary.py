"""Defines the options of the files that define a model's tokens; loads and writes these."""

from __future__ import annotations

import argparse
import codecs
import shutil
from pathlib import Path
from typing import NamedTuple, Optional

from fairseq.data import Dictionary

from fairseq_posenc.checkpoints.dictionary import load_dictionary
from fairseq_posenc.errors import UserError
from fairseq_posenc.files import written_whole
from fairseq_posenc.folders import checksum
from fairseq_posenc.tokens.gpt2 import GPT2
from fairseq_posenc.tokens.pieces import PieceEncoder, Pieces
from fairseq_posenc.tokens.tokenizer import Tokenizer

PACKAGES = ("regex", "sentencepiece")  # the token ids depend on their versions, too
# The options of the fields of `Vocabulary`, in their order.
_OPTIONS = ("encoder_json", "vocab_bpe", "sentencepiece_model", "dict")


def add_vocabulary(group: argparse._ActionsContainer) -> None:
    """Add the options of GPT-2's BPE and of sentencepiece; programs add ``--dict`` themselves."""
    group.add_argument("--encoder-json", type=Path, help="vocabulary of GPT-2's BPE")
    group.add_argument("--vocab-bpe", type=Path, help="merges of GPT-2's BPE")
    group.add_argument("--sentencepiece-model", type=Path, help="sentencepiece model")


class Vocabulary(NamedTuple):
    """The vocabulary files that the options name; None for an option that is not set."""

    encoder_json: Optional[Path]
    vocab_bpe: Optional[Path]
    sentencepiece_model: Optional[Path]
    dict_txt: Optional[Path]

    @classmethod
    def from_args(
        cls, args: argparse.Namespace, is_by_rule: bool = False, alternatives: str = ""
    ) -> Vocabulary:
        """Build the vocabulary from the parsed options, with ``--dict``.

        ``is_by_rule`` is True if the tokens are words or characters, which need no file.
        ``alternatives`` ends the message that asks for a choice: ", or --words".

        Raises:
            UserError: the options name no vocabulary, more than one, or a missing file.
        """
        chosen = cls(*(getattr(args, name) for name in _OPTIONS))
        tokens = [chosen.encoder_json, chosen.sentencepiece_model, is_by_rule]
        if sum(map(bool, tokens)) != 1 or bool(chosen.encoder_json) != bool(chosen.vocab_bpe):
            raise UserError(
                "choose the tokens: --encoder-json and --vocab-bpe, or --sentencepiece-model"
                + alternatives
            )
        if chosen.encoder_json and not chosen.dict_txt:
            raise UserError("give --dict: the dict.txt that belongs to --encoder-json")
        for name, path in chosen.files.items():
            if not path.is_file():
                raise UserError(f"--{name.replace('_', '-')} {path} is not there")
        return chosen

    @property
    def files(self) -> dict[str, Path]:
        """The files by the options' names, without those that are None."""
        return {name: path for name, path in zip(_OPTIONS, self) if path}

    def checksums(self) -> dict[str, str]:
        """Compute the SHA-256 of the files, by the options' names."""
        return {name: checksum(path) for name, path in self.files.items()}

    def load_dictionary(self) -> Dictionary:
        """Load the dictionary of ``--dict``, or build one of all sentencepieces.

        Raises:
            UserError: the file cannot be read, has no symbol, or begins with a byte-order mark.
        """
        if self.dict_txt is None:
            assert self.sentencepiece_model
            return Pieces(self.sentencepiece_model).build_dictionary()
        dictionary = load_dictionary(self.dict_txt, mask=False)
        if len(dictionary) == dictionary.nspecial:
            raise UserError(f"--dict {self.dict_txt} holds no symbol: all words would be <unk>")
        if self.dict_txt.read_bytes().startswith(codecs.BOM_UTF8):
            raise UserError(
                f"--dict {self.dict_txt}, line 1: begins with a byte-order mark, which fairseq "
                "takes for a part of the first word; save it as UTF-8 without one"
            )
        return dictionary

    def write_dictionary(self, dictionary: Dictionary, path: Path) -> None:
        """Write the dictionary of :meth:`load_dictionary`; a file of ``--dict`` is copied."""
        if self.dict_txt is None:
            save_dictionary(dictionary, path)
        else:
            shutil.copyfile(self.dict_txt, path)

    def load_encoder(self, dictionary: Dictionary) -> Optional[Tokenizer]:
        """Load GPT-2's BPE or the sentencepieces; None if tokens are words or characters."""
        if self.encoder_json and self.vocab_bpe:
            return GPT2(self.encoder_json, self.vocab_bpe, dictionary)
        if self.sentencepiece_model:
            return PieceEncoder(Pieces(self.sentencepiece_model), dictionary)
        return None


def save_dictionary(dictionary: Dictionary, path: Path) -> None:
    """Write a dictionary to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(path) as new:
        dictionary.save(str(new))
