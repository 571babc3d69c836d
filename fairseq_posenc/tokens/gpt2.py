"""Encodes with GPT-2's byte-level BPE: tiktoken computes fairseq's token ids, 7 times as fast.

tiktoken and fairseq split text with different regular-expression engines, whose Unicode tables may
differ. The characters that the two classify differently are found at start-up; fairseq's encoder
encodes lines with such an *odd* character.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from pathlib import Path

import numpy as np
import regex
import tiktoken
from fairseq.data import Dictionary
from fairseq.data.encoders import gpt2_bpe_utils

from fairseq_posenc.errors import UserError
from fairseq_posenc.tokens.tokenizer import (
    Encoded,
    Tokens,
    spans_of_bytes,
    token_dtype,
)

_BYTES = 256  # the first ranks: the rank of a byte is its value
_CLASSES = (r"\p{L}", r"\p{N}", r"\s")  # character classes of the pattern of GPT-2
_NEWLINE = ord("\n")
_CODE_POINTS = 0x110000  # of Unicode
# tiktoken needs a special token: without any, it would search for an empty string everywhere. If
# this name occurs in a text, it is encoded as plain text.
_SPECIAL = "<|endoftext|>"


class GPT2:
    """Encodes with GPT-2's BPE for a fairseq dictionary, whose symbols are ids of ``encoder.json``.

    tiktoken's *rank* of a piece is its number in the order of bytes, then merges; its *number* is
    its id in ``encoder.json``.

    Raises:
        UserError: the files do not belong together.
    """

    def __init__(self, encoder_json: Path, vocab_bpe: Path, dictionary: Dictionary) -> None:
        self._fairseq, self._fast = _load(encoder_json, vocab_bpe)
        self._eos = dictionary.eos()
        self._odd = _find_odd_characters()
        # The pieces by rank, written with one letter per byte.
        pieces = [self._fairseq.byte_encoder[byte] for byte in range(_BYTES)]
        pieces += ["".join(pair) for pair in self._fairseq.bpe_ranks]
        self._sizes = np.array([len(piece) for piece in pieces])
        numbers = [self._fairseq.encoder[piece] for piece in pieces]
        self._rank = {number: rank for rank, number in enumerate(numbers)}
        symbols = [dictionary.index(str(number)) for number in numbers]
        self._table = np.array(symbols, dtype=token_dtype(dictionary))

    def encode(self, lines: Sequence[str]) -> Encoded:
        """Encode lines that neither begin nor end with white space."""
        if lines and "" not in lines and not self._is_odd("\n".join(lines)):
            return self._encode_run(lines)
        # An empty part, as there may be no lines; then runs of ordinary lines, which are encoded
        # together, and other lines, one by one.
        parts = [Encoded(self._table[:0], np.zeros(0, np.int32))]
        for is_odd, group in groupby(lines, lambda line: not line or self._is_odd(line)):
            run = list(group)
            parts += map(self._encode_slowly, run) if is_odd else [self._encode_run(run)]
        return Encoded(*map(np.concatenate, zip(*parts)))

    def tokens(self, text: str) -> Tokens:
        """Tokenize a text; see :class:`Tokenizer`."""
        try:
            ranks = self._slow_ranks(text) if self._is_odd(text) else self._fast_ranks(text)
        except ValueError:  # of tiktoken alone
            ranks = self._slow_ranks(text)
        spans = spans_of_bytes(text, self._sizes[ranks])
        return Tokens.from_spans(text, self._table[ranks].tolist(), spans)

    def _encode_run(self, lines: Sequence[str]) -> Encoded:
        """Encode lines that are neither empty nor odd."""
        # No line begins or ends with white space, so a newline between two lines is a token by
        # itself and does not change its neighbours.
        try:
            ranks = self._fast_ranks("\n".join(lines) + "\n")
        except ValueError:  # a run is too long; halve the lines until the line with it is alone
            if len(lines) == 1:
                return self._encode_slowly(lines[0])
            half = len(lines) // 2
            halves = self._encode_run(lines[:half]), self._encode_run(lines[half:])
            return Encoded(*map(np.concatenate, zip(*halves)))
        ends = np.flatnonzero(ranks == _NEWLINE)
        tokens = self._table[ranks]
        tokens[ends] = self._eos
        return Encoded(tokens, np.diff(ends, prepend=-1).astype(np.int32))

    def _encode_slowly(self, line: str) -> Encoded:
        tokens = np.append(self._table[self._slow_ranks(line)], self._table.dtype.type(self._eos))
        return Encoded(tokens, np.array([len(tokens)], dtype=np.int32))

    def _fast_ranks(self, text: str) -> np.ndarray:
        """Compute ranks with tiktoken, which raises ValueError for a long run of a character."""
        return self._fast.encode_to_numpy(text, disallowed_special=())

    def _slow_ranks(self, text: str) -> np.ndarray:
        """Compute the same ranks with fairseq's encoder."""
        ranks = [self._rank[number] for number in self._fairseq.encode(text)]
        self._fairseq.cache.clear()  # else it would grow without limit
        return np.array(ranks, dtype=np.int64)

    def _is_odd(self, text: str) -> bool:
        if text.isascii():
            return False
        characters = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
        return bool(self._odd[characters].any())


@lru_cache(maxsize=1)
def _load(encoder_json: Path, vocab_bpe: Path) -> tuple[gpt2_bpe_utils.Encoder, tiktoken.Encoding]:
    """Load fairseq's encoder, and tiktoken's with the same merges."""
    try:
        fairseq = gpt2_bpe_utils.get_encoder(str(encoder_json), str(vocab_bpe))
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise UserError(f"{encoder_json}, {vocab_bpe}: {error}") from None
    _check_merges(fairseq, encoder_json, vocab_bpe)
    ranks = {bytes([byte]): byte for byte in range(_BYTES)}
    for pair, rank in fairseq.bpe_ranks.items():
        ranks[bytes(fairseq.byte_decoder[c] for c in "".join(pair))] = _BYTES + rank
    fast = tiktoken.Encoding(
        "gpt2",
        pat_str=fairseq.pat.pattern,
        mergeable_ranks=ranks,
        special_tokens={_SPECIAL: len(ranks)},
    )
    return fairseq, fast


def _check_merges(fairseq: gpt2_bpe_utils.Encoder, encoder_json: Path, vocab_bpe: Path) -> None:
    """Check that tiktoken merges as GPT-2 does.

    GPT-2 ranks a merge by its pair, tiktoken by its result. They agree if every merge makes a piece
    that no other merge makes, and if the text of a piece is merged to this piece.

    Raises:
        UserError: they disagree, or a file is malformed.
    """
    numbers = list(fairseq.encoder.values())
    if len(fairseq.decoder) < len(numbers) or any(type(number) is not int for number in numbers):
        raise UserError(f"{encoder_json}: must give each piece a different whole number")
    seen = set(fairseq.byte_decoder)
    for number, pair in enumerate(fairseq.bpe_ranks, start=2):
        piece = "".join(pair)
        where = f"{vocab_bpe}, line {number}: {' '.join(pair)}"
        if len(pair) != 2 or not seen.issuperset(pair):
            raise UserError(f"{where} is not a pair of pieces made so far")
        if piece not in fairseq.encoder:
            raise UserError(f"{where} makes a piece that is not in {encoder_json}")
        if piece in seen or fairseq.bpe(piece) != piece:
            raise UserError(f"{where} makes a piece that other lines make from another pair")
        seen.add(piece)
    if missing := [c for c in fairseq.byte_decoder if c not in fairseq.encoder]:
        raise UserError(f"{encoder_json} does not have the byte {missing[0]!r}")
    fairseq.cache.clear()


@lru_cache(maxsize=1)
def _find_odd_characters() -> np.ndarray:
    """Mark the code points that tiktoken and fairseq classify differently, ``[_CODE_POINTS]``."""
    surrogates = range(0xD800, 0xE000)  # halves of characters in UTF-16
    characters = "".join(chr(c) for c in range(_CODE_POINTS) if c not in surrogates)
    single = {bytes([byte]): byte for byte in range(_BYTES)}
    odd = np.zeros(_CODE_POINTS, dtype=bool)
    for pattern in _CLASSES:
        probe = tiktoken.Encoding(
            "probe", pat_str=pattern, mergeable_ranks=single, special_tokens={_SPECIAL: _BYTES}
        )
        # With single bytes as tokens, its tokens are the bytes of the characters that match.
        by_tiktoken = bytes(probe.encode_ordinary(characters)).decode()
        by_fairseq = "".join(regex.findall(pattern, characters))
        odd[[ord(c) for c in set(by_tiktoken) ^ set(by_fairseq)]] = True
    return odd
