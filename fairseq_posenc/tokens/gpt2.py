"""Encodes with GPT-2's byte-level BPE: fairseq's encoder computes each different word once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path

import numpy as np
from fairseq.data import Dictionary
from fairseq.data.encoders import gpt2_bpe_utils

from fairseq_posenc.errors import UserError
from fairseq_posenc.tokens.tokenizer import Encoded, TextTokens, spans_of_bytes, token_dtype

_CACHED_WORDS = 1 << 18  # different words whose tokens are kept in memory


class GPT2:
    """Encodes with GPT-2's BPE for a fairseq dictionary, whose symbols are ids of ``encoder.json``.

    Raises:
        UserError: the files do not belong together.
    """

    def __init__(self, encoder_json: Path, vocab_bpe: Path, dictionary: Dictionary) -> None:
        fairseq = _load(encoder_json, vocab_bpe)
        self._find_words = fairseq.pat.findall  # as the pattern of GPT-2 splits a text
        self._words = _EncodedWords(fairseq, dictionary)
        self._eos = dictionary.eos()
        self._dtype = token_dtype(dictionary)

    def encode(self, lines: Sequence[str]) -> Encoded:
        """Encode lines that neither begin nor end with white space."""
        encoded = [[*self._encode_text(line), self._eos] for line in lines]
        sizes = np.fromiter(map(len, encoded), np.int32, len(encoded))
        tokens = np.fromiter(chain.from_iterable(encoded), self._dtype, int(sizes.sum()))
        return Encoded(tokens, sizes)

    def tokens(self, text: str) -> TextTokens:
        """Tokenize a text; see :class:`Tokenizer`."""
        pieces = [piece for word in self._find_words(text) for piece in self._words.split(word)]
        # A piece is written with one letter per byte.
        spans = spans_of_bytes(text, np.array([len(piece) for piece in pieces], np.int64))
        return TextTokens.from_spans(text, [*self._encode_text(text)], spans)

    def _encode_text(self, text: str) -> Iterable[int]:
        return chain.from_iterable(map(self._words.__getitem__, self._find_words(text)))


class _EncodedWords(dict[str, tuple[int, ...]]):
    """The token ids of the words seen so far; a new word is encoded when it is looked up."""

    def __init__(self, fairseq: gpt2_bpe_utils.Encoder, dictionary: Dictionary) -> None:
        self._fairseq, self._dictionary = fairseq, dictionary

    def split(self, word: str) -> list[str]:
        """Split a word into pieces, which have one letter per byte."""
        letters = "".join(self._fairseq.byte_encoder[byte] for byte in word.encode("utf-8"))
        pieces: list[str] = self._fairseq.bpe(letters).split(" ")
        self._fairseq.cache.clear()  # else it would grow without limit
        return pieces

    def __missing__(self, word: str) -> tuple[int, ...]:
        if len(self) >= _CACHED_WORDS:
            self.clear()
        numbers = [self._fairseq.encoder[piece] for piece in self.split(word)]
        self[word] = tuple(self._dictionary.index(str(number)) for number in numbers)
        return self[word]


@lru_cache(maxsize=1)
def _load(encoder_json: Path, vocab_bpe: Path) -> gpt2_bpe_utils.Encoder:
    """Load fairseq's encoder, and check that its files have all pieces."""
    try:
        fairseq = gpt2_bpe_utils.get_encoder(str(encoder_json), str(vocab_bpe))
        numbers = set(fairseq.encoder.values())
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise UserError(f"{encoder_json}, {vocab_bpe}: {error}") from None
    if len(numbers) < len(fairseq.encoder) or any(type(number) is not int for number in numbers):
        raise UserError(f"{encoder_json}: must give each piece a different whole number")
    # A line that is not a pair is shown whole: no piece has a space.
    merged = [("" if len(pair) == 2 else " ").join(pair) for pair in fairseq.bpe_ranks]
    if missing := [x for x in (*fairseq.byte_decoder, *merged) if x not in fairseq.encoder]:
        raise UserError(f"{encoder_json}: lacks the piece {missing[0]!r} of {vocab_bpe}")
    return fairseq
