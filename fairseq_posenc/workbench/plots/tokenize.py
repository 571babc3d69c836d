"""Text cut as a model's data was, with what of it each symbol is: the labels of pictures."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, Optional

from fairseq.data import Dictionary

from fairseq_posenc.errors import UserError, shortened
from fairseq_posenc.workbench.tokens.offsets import Tokens
from fairseq_posenc.workbench.tokens.pieces import PieceEncoder, Pieces
from fairseq_posenc.workbench.tokens.symbols import SPACE, SymbolEncoder, words
from fairseq_posenc.workbench.tokens.tokenizer import ENCODER, PIECES, Tokenizer, load_tokenizer


class TokenizedText(NamedTuple):
    """Symbols of a text.

    Attributes:
        ids: their numbers in the dictionary.
        labels: what of the text each is.
    """

    ids: list[int]
    labels: list[str]

    @classmethod
    def of_ids(cls, ids: Iterable[int], dictionary: Dictionary) -> TokenizedText:
        """Return symbols that come from no text; their names are the labels."""
        found = list(map(int, ids))
        return cls(found, [dictionary[each].strip(SPACE) or SPACE for each in found])

    def __add__(self, other: TokenizedText) -> TokenizedText:  # type: ignore[override]
        """Return these symbols and those that follow."""
        return TokenizedText(self.ids + other.ids, self.labels + other.labels)


class _Words(SymbolEncoder):
    """What stands between white space, which is how fairseq reads text that is cut already."""

    def __init__(self, dictionary: Dictionary) -> None:
        super().__init__(words, dictionary)

    def tokens(self, text: str) -> Tokens:
        """Return a text's tokens; see :class:`Tokenizer`."""
        found = list(re.finditer(r"\S+", text))
        ids = [self.index(word[0]) for word in found]
        return Tokens.from_spans(text, ids, (word.span() for word in found))


def tokenize(
    text: str, option: str, folder: Path, dictionary: Dictionary, language: Optional[str] = None
) -> TokenizedText:
    """Return the symbols of a text.

    It is cut by the tokenizer of a data-bin; where that has none, at white space, as by fairseq.

    Args:
        text: raw.
        option: that gave it, for messages.
        folder: the data-bin.
        dictionary: of the language.
        language: of the text, where the data-bin has several.

    Raises:
        UserError: there is nothing in it that the dictionary knows.
    """
    tokens = _tokenizer(folder, dictionary, language).tokens(text)
    unknown = dictionary.unk()
    if all(number == unknown for number in tokens.ids):
        raise UserError(
            f"{option} {shortened(text)!r}: has no symbol of the dictionary in {folder}; a text "
            f"is cut by {PIECES} or {ENCODER} there, and without them at white space"
        )
    labels = [text[start:end].strip() or SPACE for start, end in zip(tokens.starts, tokens.ends)]
    for place, number in enumerate(tokens.ids):
        if number == unknown:
            labels[place] += " (unknown)"
    return TokenizedText(tokens.ids.tolist(), labels)


def _tokenizer(folder: Path, dictionary: Dictionary, language: Optional[str]) -> Tokenizer:
    own = folder / f"sentencepiece.{language}.model"
    if language and own.exists():
        return PieceEncoder(Pieces(own), dictionary)
    if (folder / PIECES).exists() or (folder / ENCODER).exists():
        return load_tokenizer(folder, dictionary)
    return _Words(dictionary)
