"""Loads the tokenizer of a folder, which its files determine."""

from __future__ import annotations

from pathlib import Path

from fairseq.data import Dictionary

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.tokens.gpt2 import GPT2
from fairseq_posenc.workbench.tokens.pieces import PieceEncoder, Pieces
from fairseq_posenc.workbench.tokens.tokenizer import ENCODER_JSON, MERGES, PIECES, Tokenizer


def load_tokenizer(folder: Path, dictionary: Dictionary) -> Tokenizer:
    """Load the tokenizer whose files are in a folder.

    Raises:
        UserError: the files are missing, or cannot be read.
    """
    if (folder / PIECES).exists():
        return PieceEncoder(Pieces(folder / PIECES), dictionary)
    if (folder / ENCODER_JSON).exists():
        return GPT2(folder / ENCODER_JSON, folder / MERGES, dictionary)
    raise UserError(f"{folder}: holds neither {PIECES} nor {ENCODER_JSON} and {MERGES}")
