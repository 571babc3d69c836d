"""Text to tokens that know which characters of the text they stand for.

An answer has to be a piece of the text as it was, so nothing is ever put back together from tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Optional, Protocol

import numpy as np
from fairseq.data import Dictionary
from fairseq.data.encoders import gpt2_bpe_utils

from fairseq_posenc.errors import UserError

ENCODER, MERGES = "encoder.json", "vocab.bpe"
PIECES = "sentencepiece.model"


class Tokens(NamedTuple):
    """The tokens of a text, and the characters that each stands for.

    Attributes:
        ids: ``[T]``, numbers in fairseq's dictionary.
        starts: ``[T]``, each token's first character that is no leading white space.
        ends: ``[T]``, the character after its last. Tokens that share a character, such as the
            bytes of one letter, overlap; both arrays never fall.
    """

    ids: np.ndarray
    starts: np.ndarray
    ends: np.ndarray

    def covering(self, start: int, end: int) -> Optional[tuple[int, int]]:
        """Return the first and the last token of the characters from start to end.

        None if all of them lie between tokens.
        """
        first = int(np.searchsorted(self.ends, start, side="right"))
        last = int(np.searchsorted(self.starts, end, side="left")) - 1
        return (first, last) if first <= last else None


class Tokenizer(Protocol):
    """Cuts texts as a model's pre-training data was cut."""

    def encode(self, text: str) -> Tokens:
        """Return a text's tokens."""
        ...


def load_tokenizer(folder: Path, dictionary: Dictionary) -> Tokenizer:
    """Return the tokenizer whose files lie in a folder.

    Raises:
        UserError: there are none, or they cannot be read.
    """
    if (folder / PIECES).exists():
        return Pieces(folder / PIECES, dictionary)
    if (folder / ENCODER).exists():
        return ByteLevelBPE(folder / ENCODER, folder / MERGES, dictionary)
    raise UserError(f"{folder}: holds neither {PIECES} nor {ENCODER} and {MERGES}")


class ByteLevelBPE:
    """GPT-2's byte-level BPE, which RoBERTa has; its tokens are bytes, not characters.

    Args:
        encoder_json: the vocabulary.
        vocab_bpe: the merges.
        dictionary: fairseq's, with the numbers of the vocabulary as symbols.
    """

    def __init__(self, encoder_json: Path, vocab_bpe: Path, dictionary: Dictionary) -> None:
        try:
            self._bpe = gpt2_bpe_utils.get_encoder(str(encoder_json), str(vocab_bpe))
        except (OSError, ValueError) as error:
            raise UserError(f"{encoder_json}, {vocab_bpe}: {error}") from None
        self._index = dictionary.index

    def encode(self, text: str) -> Tokens:
        """Return a text's tokens; see :class:`Tokenizer`."""
        numbers = self._bpe.encode(text)
        # A piece is written with one letter for each of its bytes.
        sizes = np.array([len(self._bpe.decoder[number]) for number in numbers], dtype=np.int64)
        ends = np.cumsum(sizes)
        character = _character_of_byte(text)
        spans = zip(character[ends - sizes].tolist(), (character[ends - 1] + 1).tolist())
        return _tokens(text, [self._index(str(number)) for number in numbers], list(spans))


class Pieces:
    """Sentencepieces; the model normalises, but knows what of the text a piece was.

    Args:
        model: file that sentencepiece's training wrote.
        dictionary: fairseq's, with the pieces as symbols.
    """

    def __init__(self, model: Path, dictionary: Dictionary) -> None:
        import sentencepiece

        try:
            self._pieces = sentencepiece.SentencePieceProcessor(model_file=str(model))
        except (OSError, RuntimeError) as error:
            raise UserError(f"{model}: {' '.join(str(error).split())}") from None
        if not hasattr(self._pieces, "EncodeAsOffsetMapping"):
            raise UserError("sentencepiece is too old to give offsets; update it to 0.2.3 or newer")
        self._index = dictionary.index

    def encode(self, text: str) -> Tokens:
        """Return a text's tokens; see :class:`Tokenizer`."""
        found = self._pieces.encode(text, return_type="offset_mapping")
        spans = list(found["offsets"])
        # Of pieces made from one character (as 1/2 from ½) the last alone has it: share it.
        for i in reversed(range(len(spans) - 1)):
            if spans[i][0] == spans[i][1]:
                spans[i] = spans[i + 1]
        # By way of the numbers, since what is unknown must become <unk>, as in pre-training.
        ids = [self._index(self._pieces.id_to_piece(number)) for number in found["ids"]]
        return _tokens(text, ids, spans)


def _tokens(text: str, ids: list[int], spans: list[tuple[int, int]]) -> Tokens:
    starts = [end - (len(text[start:end].lstrip()) or end - start) for start, end in spans]
    ends = [end for _, end in spans]
    return Tokens(*(np.array(values, dtype=np.int64) for values in (ids, starts, ends)))


def _character_of_byte(text: str) -> np.ndarray:
    """Return which character of a text each byte of its UTF-8 belongs to."""
    codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    sizes = 1 + sum((codes >= limit).astype(np.int64) for limit in (0x80, 0x800, 0x10000))
    return np.repeat(np.arange(len(text)), sizes)
