"""Trains and loads sentencepiece models, and tokenizes with them.

A piece's number in the model is not its token id: that is its index in fairseq's dictionary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairseq_posenc.errors import UserError
from fairseq_posenc.tokens.symbols import SymbolEncoder
from fairseq_posenc.tokens.tokenizer import TextTokens

if TYPE_CHECKING:
    from fairseq.data import Dictionary

_MAX_LINE_BYTES = 1 << 20  # sentencepiece silently skips longer lines (default: 4,192)


def learn_pieces(vocab_size: int, **options: Any) -> None:
    """Train a sentencepiece model, with options of sentencepiece's trainer, which name the text.

    Raises:
        UserError: the text has too few or too many different pieces for that size.
    """
    import sentencepiece

    try:
        sentencepiece.SentencePieceTrainer.train(
            vocab_size=vocab_size, max_sentence_length=_MAX_LINE_BYTES, minloglevel=2, **options
        )
    except RuntimeError as error:
        # sentencepiece says what is wrong, and the best size, after the place in its source.
        reason = " ".join(str(error).split()).rpartition("] ")[2]
        raise UserError(f"--vocab-size {vocab_size}: {reason}") from None


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
        # The texts of the pieces, by number.
        self.texts = [self.model.id_to_piece(i) for i in range(self.model.get_piece_size())]
        broken = [text for text in self.texts if len(text.split()) != 1]
        if broken:
            raise UserError(
                f"{path}: has the piece {broken[0]!r}, and fairseq separates symbols by white "
                "space; train a model without it"
            )

    def __call__(self, lines: Sequence[str]) -> Iterable[Sequence[str]]:
        """Split each line, as a ``Splitter`` of ``symbols.py``; unknown text becomes ``<unk>``."""
        encoded = self.model.encode(list(lines), num_threads=1)  # workers share the cores
        return ([self.texts[number] for number in numbers] for numbers in encoded)

    def build_dictionary(self) -> Dictionary:
        """Build a dictionary of all pieces that can occur in a text, in the model's order."""
        from fairseq.data import Dictionary

        dictionary = Dictionary()
        for number, text in enumerate(self.texts):
            if not self.model.is_control(number) and not self.model.is_unknown(number):
                dictionary.add_symbol(text)
        return dictionary


class PieceEncoder(SymbolEncoder):
    """Encodes with sentencepieces; offsets refer to the text before the model normalises it."""

    def __init__(self, pieces: Pieces, dictionary: Dictionary) -> None:
        super().__init__(pieces, dictionary)
        self._pieces = pieces

    def tokens(self, text: str) -> TextTokens:
        """Tokenize a text, as a ``Tokenizer`` of ``tokenizer.py``."""
        encoded = self._pieces.model.encode(text, return_type="offset_mapping")
        spans = list(encoded["offsets"])
        # If a character becomes several pieces (½: 1, ⁄, 2), only the last has its span; the others
        # get the same.
        for i in reversed(range(len(spans) - 1)):
            if spans[i][0] == spans[i][1]:
                spans[i] = spans[i + 1]
        ids = [self.index(self._pieces.texts[number]) for number in encoded["ids"]]
        return TextTokens.from_spans(text, ids, spans)
