"""Loads the tokenizer of a model's pre-training from the files of a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from fairseq.data import Dictionary

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.tokens.gpt2 import GPT2
from fairseq_posenc.workbench.tokens.numbers import Encoder
from fairseq_posenc.workbench.tokens.offsets import Tokens
from fairseq_posenc.workbench.tokens.pieces import PieceEncoder, Pieces

ENCODER, MERGES = "encoder.json", "vocab.bpe"
PIECES = "sentencepiece.model"


class Tokenizer(Encoder, Protocol):
    """An encoder that also knows the characters of each token."""

    def tokens(self, text: str) -> Tokens:
        """Tokenize a text."""
        ...


def load_tokenizer(folder: Path, dictionary: Dictionary) -> Tokenizer:
    """Load the tokenizer whose files lie in a folder.

    Raises:
        UserError: the files are missing, or cannot be read.
    """
    if (folder / PIECES).exists():
        return PieceEncoder(Pieces(folder / PIECES), dictionary)
    if (folder / ENCODER).exists():
        return GPT2(folder / ENCODER, folder / MERGES, dictionary)
    raise UserError(f"{folder}: holds neither {PIECES} nor {ENCODER} and {MERGES}")
