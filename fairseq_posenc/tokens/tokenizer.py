"""What cuts text as a model's pre-training data was cut, from the files of a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from fairseq.data import Dictionary

from fairseq_posenc.errors import UserError
from fairseq_posenc.tokens.gpt2 import GPT2
from fairseq_posenc.tokens.numbers import Encoder
from fairseq_posenc.tokens.offsets import Tokens
from fairseq_posenc.tokens.pieces import PieceEncoder, Pieces

ENCODER, MERGES = "encoder.json", "vocab.bpe"
PIECES = "sentencepiece.model"


class Tokenizer(Encoder, Protocol):
    """An encoder that also knows what of a text each token was."""

    def tokens(self, text: str) -> Tokens:
        """Return a text's tokens."""
        ...


def load_tokenizer(folder: Path, dictionary: Dictionary) -> Tokenizer:
    """Return the tokenizer whose files lie in a folder.

    Raises:
        UserError: there are none, or they cannot be read.
    """
    if (folder / PIECES).exists():
        return PieceEncoder(Pieces(folder / PIECES), dictionary)
    if (folder / ENCODER).exists():
        return GPT2(folder / ENCODER, folder / MERGES, dictionary)
    raise UserError(f"{folder}: holds neither {PIECES} nor {ENCODER} and {MERGES}")
