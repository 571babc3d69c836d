"""Trains sentencepiece models, or loads trained ones, with the ids of fairseq's dictionary.

Models trained here only reduce white space to single spaces and change nothing else, so joined
pieces are the original text. Characters that the training text lacks become ``<unk>``.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from fairseq.data import Dictionary

from fairseq_posenc.errors import UserError
from fairseq_posenc.tokens.files import read_bytes
from fairseq_posenc.tokens.pieces import PieceEncoder, Pieces, learn_pieces
from fairseq_posenc.tokens.tokenizer import Encoded

from .texts import NumberedLines

VOCABULARY = "vocab.json"  # in the folder of the source language's model
_SYMBOLS = ("<s>", "<pad>", "</s>", "<unk>")  # fairseq's special symbols, in its order


def train_model(lines: Iterable[str], vocab_size: int, model_type: str, threads: int) -> bytes:
    """Train a sentencepiece model, ``bpe`` or ``unigram``; return the content of its file.

    ``vocab_size`` includes the four special symbols.

    Raises:
        UserError: the text has too few or too many different pieces for that size.
    """
    model = io.BytesIO()
    learn_pieces(
        vocab_size,
        sentence_iterator=(" ".join(line.split()) for line in lines),
        model_writer=model,
        model_type=model_type,
        character_coverage=1.0,
        normalization_rule_name="identity",
        num_threads=threads,
        bos_id=0,
        pad_id=1,
        eos_id=2,
        unk_id=3,
    )
    return model.getvalue()


def read_vocabulary(path: Path) -> list[str]:
    """Read the pieces in the ``vocab.json`` of a translation model of Helsinki-NLP (opus-mt).

    It maps the pieces of both languages to ids; the result has them in this order, without the
    special symbols.

    Raises:
        UserError: the file is missing or broken.
    """
    content = read_bytes(path)
    try:
        numbers = json.loads(content)
        pieces: list[str] = sorted(numbers, key=numbers.__getitem__)
        is_whole = sorted(numbers.values()) == list(range(len(pieces)))
    except (ValueError, TypeError, AttributeError, RecursionError):
        is_whole = False
    if not is_whole:
        raise UserError(f"{path}: not a vocabulary, which gives each piece a number from 0 on")
    return [piece for piece in pieces if piece not in _SYMBOLS]


class SubwordVocabulary(NamedTuple):
    """The sentencepieces of a language, and the dictionary of their ids."""

    pieces: Pieces
    dictionary: Dictionary

    @classmethod
    def load(cls, path: Path, names: Sequence[str] = ()) -> SubwordVocabulary:
        """Load a model.

        Args:
            path: the ``.model`` file.
            names: the pieces in the order of their ids, after fairseq's special symbols; by default
                all pieces of the model. Others become ``<unk>``, as in opus-mt.

        Raises:
            UserError: the file is not a model, or has none of the pieces.
        """
        pieces = Pieces(path)
        if names and set(names).isdisjoint(pieces.texts):
            raise UserError(f"{path}: none of its pieces is in {VOCABULARY}")
        dictionary = Dictionary()
        for name in names or pieces.texts[dictionary.nspecial :]:
            dictionary.add_symbol(name)
        return cls(pieces, dictionary)

    def encode(self, text: NumberedLines) -> Encoded:
        """Encode lines, each ended by ``</s>``; white space becomes single spaces."""
        lines = [" ".join(line.split()) for line in text.lines]
        return PieceEncoder(self.pieces, self.dictionary).encode(lines)
