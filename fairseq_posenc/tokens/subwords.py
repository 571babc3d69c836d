"""Encodes with subwords: GPT-2's byte-level BPE by fairseq's encoder, and sentencepieces.

A subword's number in its model is not its token id: that is its index in fairseq's dictionary.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fairseq_posenc.errors import UserError
from fairseq_posenc.tokens.tokenizer import SymbolEncoder, TextTokens, find_spans

if TYPE_CHECKING:
    from fairseq.data import Dictionary
    from fairseq.data.encoders import gpt2_bpe_utils

_CACHED_WORDS = 1 << 18  # different words whose tokens are kept in memory
_MAX_LINE_BYTES = 1 << 20  # sentencepiece silently skips longer lines (default: 4,192)


class GPT2(SymbolEncoder):
    """Encodes with GPT-2's BPE for a fairseq dictionary, whose symbols are ids of ``encoder.json``.

    Raises:
        UserError: a file cannot be read, or ``encoder.json`` lacks a piece or numbers two alike.
    """

    def __init__(self, encoder_json: Path, vocab_bpe: Path, dictionary: "Dictionary") -> None:
        encoder = _load(encoder_json, vocab_bpe)
        self._find_words = encoder.pat.findall  # as the pattern of GPT-2 splits a text
        self._words = _SplitWords(encoder)  # word -> its symbols
        super().__init__(partial(map, self._find_symbols), dictionary)  # lines to their symbols

    def tokens(self, text: str) -> TextTokens:
        """Tokenize a text, with the characters of each token."""
        pieces = [piece for word in self._find_words(text) for piece in self._words.split(word)]
        # First character of each piece, and the one after it; a piece has one letter per byte.
        spans = find_spans(text, np.array([len(piece) for piece in pieces], np.int64))
        return TextTokens.from_spans(text, [self.index(x) for x in self._find_symbols(text)], spans)

    def _find_symbols(self, text: str) -> Iterable[str]:
        return chain.from_iterable(map(self._words.__getitem__, self._find_words(text)))


class _SplitWords(dict[str, list[str]]):
    """The symbols of the words seen so far; a new word is split when it is looked up."""

    def __init__(self, encoder: "gpt2_bpe_utils.Encoder") -> None:
        self._encoder = encoder

    def split(self, word: str) -> list[str]:
        """Split a word into pieces, which have one letter per byte."""
        letters = "".join(self._encoder.byte_encoder[byte] for byte in word.encode("utf-8"))
        pieces: list[str] = self._encoder.bpe(letters).split(" ")
        self._encoder.cache.clear()  # otherwise it would grow without limit
        return pieces

    def __missing__(self, word: str) -> list[str]:
        if len(self) >= _CACHED_WORDS:
            self.clear()
        self[word] = [str(self._encoder.encoder[piece]) for piece in self.split(word)]
        return self[word]


@lru_cache(maxsize=1)  # loading takes seconds; kept for the next tokenizer of the same files
def _load(encoder_json: Path, vocab_bpe: Path) -> "gpt2_bpe_utils.Encoder":
    """Load fairseq's encoder, and check that its files have all pieces."""
    from fairseq.data.encoders import gpt2_bpe_utils

    try:
        encoder = gpt2_bpe_utils.get_encoder(str(encoder_json), str(vocab_bpe))
        numbers = set(encoder.encoder.values())
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise UserError(f"{encoder_json}, {vocab_bpe}: give GPT-2's files ({error})") from None
    if len(numbers) < len(encoder.encoder) or any(type(number) is not int for number in numbers):
        raise UserError(f"{encoder_json}: must give each piece a different whole number")
    # A line that is not a pair is shown whole: no piece has a space.
    merged = [("" if len(pair) == 2 else " ").join(pair) for pair in encoder.bpe_ranks]
    if missing := [x for x in (*encoder.byte_decoder, *merged) if x not in encoder.encoder]:
        origin = f" of {vocab_bpe}" if missing[0] in merged else ", which is a single byte"
        raise UserError(f"{encoder_json}: lacks the piece {missing[0]!r}{origin}")
    return encoder


def learn_pieces(vocab_size: int, **options: Any) -> None:
    """Train a sentencepiece model, with options of sentencepiece's trainer, which name the text.

    Raises:
        UserError: the text has too few or too many different pieces for that size, or is empty.
    """
    import sentencepiece

    size = min(vocab_size, 2**31 - 1)  # the largest that it parses, which no text reaches
    options |= {"max_sentence_length": _MAX_LINE_BYTES, "minloglevel": 2}
    try:
        sentencepiece.SentencePieceTrainer.train(vocab_size=size, **options)
    except RuntimeError as error:
        # After the place in its source, sentencepiece says what is wrong, and names another option.
        text = " ".join(str(error).split())
        reason = text.partition("] ")[2].partition(" or decrease ")[0]
        if "[insert_id(" in text:
            reason = "too few for the special symbols; give more"
        about = f"--vocab-size {vocab_size}" if reason else "sentencepiece"
        raise UserError(f"{about}: {reason or text}") from None


class Pieces:
    """A trained sentencepiece model, the ``.model`` file.

    Raises:
        UserError: the file is not a model, or has pieces that no fairseq dictionary can contain.
    """

    def __init__(self, path: Path) -> None:
        import sentencepiece

        try:
            self.model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (OSError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            raise UserError(f"{path}: not a sentencepiece model ({reason})") from None
        # The pieces as strings, by number.
        self.texts = [self.model.id_to_piece(i) for i in range(self.model.get_piece_size())]
        if broken := [text for text in self.texts if len(text.split()) != 1]:
            text = "fairseq separates symbols at white space: train a model whose pieces have none"
            raise UserError(f"{path}: has the piece {broken[0]!r}, but {text}")

    def __call__(self, lines: Sequence[str]) -> Iterable[Sequence[str]]:
        """Split each line into pieces, as strings; unknown text becomes ``<unk>``."""
        encoded = self.model.encode(list(lines), num_threads=1)  # preprocess has several workers
        return ([self.texts[number] for number in numbers] for numbers in encoded)

    def build_dictionary(self) -> "Dictionary":
        """Build a dictionary of all pieces that can occur in a text, in the model's order."""
        from fairseq.data import Dictionary

        dictionary = Dictionary()
        for number, text in enumerate(self.texts):
            if not self.model.is_control(number) and not self.model.is_unknown(number):
                dictionary.add_symbol(text)
        return dictionary


class PieceEncoder(SymbolEncoder):
    """Encodes with sentencepieces; offsets refer to the text before the model normalizes it."""

    def __init__(self, pieces: Pieces, dictionary: "Dictionary") -> None:
        super().__init__(pieces, dictionary)
        self._pieces = pieces

    def tokens(self, text: str) -> TextTokens:
        """Tokenize a text, with the characters of each token."""
        encoded = self._pieces.model.encode(text, return_type="offset_mapping")  # two lists
        spans = list(encoded["offsets"])  # first character of each piece, and the one after it
        # If a character becomes several pieces (½: 1, ⁄, 2), only the last has its span: copy it.
        for i, (start, end) in reversed([*enumerate(spans[:-1])]):
            if start == end:
                spans[i] = spans[i + 1]
        ids = [self.index(self._pieces.texts[number]) for number in encoded["ids"]]
        return TextTokens.from_spans(text, ids, spans)


Tokenizer = GPT2 | PieceEncoder  # both also find the characters of each token
