"""Sentencepieces: a trained model opened, and text cut with it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fairseq_posenc.errors import UserError
from fairseq_posenc.tokens.offsets import Tokens
from fairseq_posenc.tokens.symbols import SymbolEncoder

if TYPE_CHECKING:
    from fairseq.data import Dictionary


class Pieces:
    """A model that sentencepiece's training wrote; what it does not know is its unknown piece.

    Args:
        path: of its file.

    Raises:
        UserError: it is not a model, or has pieces that no fairseq dictionary can hold.
    """

    def __init__(self, path: Path) -> None:
        import sentencepiece

        try:
            self.model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (OSError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            raise UserError(f"{path}: not a sentencepiece model ({reason})") from None
        self.names = [self.model.id_to_piece(i) for i in range(self.model.get_piece_size())]
        broken = [name for name in self.names if len(name.split()) != 1]
        if broken:
            raise UserError(
                f"{path}: has the piece {broken[0]!r}, and fairseq separates symbols by white "
                "space; train a model without it"
            )

    def __call__(self, lines: Sequence[str]) -> Iterable[Sequence[str]]:
        """Return each line's pieces.

        By way of their numbers, so that what is unknown is ``<unk>`` and no word of its own.
        """
        return ([self.names[number] for number in line] for line in self.numbers(lines))

    def numbers(self, lines: Sequence[str]) -> list[list[int]]:
        """Return the model's own numbers of each line's pieces."""
        found: list[list[int]] = self.model.encode(list(lines), num_threads=1)
        return found

    def dictionary(self) -> Dictionary:
        """Return a dictionary of all pieces that can occur in a text, in the model's order."""
        from fairseq.data import Dictionary

        made = Dictionary()
        for number, name in enumerate(self.names):
            if not self.model.is_control(number) and not self.model.is_unknown(number):
                made.add_symbol(name)
        return made


class PieceEncoder(SymbolEncoder):
    """Sentencepieces with a dictionary of theirs; the model normalises, but knows the offsets.

    Args:
        pieces: the model.
        dictionary: fairseq's, with the pieces as symbols.
    """

    def __init__(self, pieces: Pieces, dictionary: Dictionary) -> None:
        super().__init__(pieces, dictionary)
        self._pieces = pieces

    def tokens(self, text: str) -> Tokens:
        """Return a text's tokens; see :class:`Tokenizer`."""
        if not hasattr(self._pieces.model, "EncodeAsOffsetMapping"):
            raise UserError("sentencepiece is too old to give offsets; update it to 0.2.3 or newer")
        found = self._pieces.model.encode(text, return_type="offset_mapping")
        spans = list(found["offsets"])
        # Of pieces made from one character (as 1/2 from ½) the last alone has it: share it.
        for i in reversed(range(len(spans) - 1)):
            if spans[i][0] == spans[i][1]:
                spans[i] = spans[i + 1]
        ids = [self.index(self._pieces.names[number]) for number in found["ids"]]
        return Tokens.of(text, ids, spans)
