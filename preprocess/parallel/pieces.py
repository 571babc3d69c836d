"""Sentencepieces whose numbers are also fairseq's, so that nothing is translated between the two.

The text itself is not changed (no Unicode normalisation; only runs of white space become one
space), so pieces joined again are the text that they were made from. The single exception is a
character that the training text does not have: it becomes ``<unk>``.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from fairseq_posenc.running.devices import cores
from fairseq_posenc.tokens import pieces
from fairseq_posenc.tokens.learning import learn_pieces
from parallel.filters import Pieces

UNKNOWN, SPECIAL = 3, 4  # number of <unk>, and of all symbols that fairseq puts first


def train(lines: Iterable[str], vocab_size: int, model_type: str) -> bytes:
    """Learn sentencepieces and return the model, the content of a ``.model`` file.

    Args:
        lines: the text.
        vocab_size: number of pieces, the four special symbols included.
        model_type: ``bpe`` or ``unigram``.

    Raises:
        UserError: the text does not support that many pieces, or needs more.
    """
    model = io.BytesIO()
    learn_pieces(
        vocab_size,
        sentence_iterator=(" ".join(line.split()) for line in lines),
        model_writer=model,
        model_type=model_type,
        character_coverage=1.0,
        normalization_rule_name="identity",
        num_threads=cores(),
        bos_id=0,
        pad_id=1,
        eos_id=2,
        unk_id=UNKNOWN,
    )
    return model.getvalue()


class Encoder:
    """A trained model.

    Args:
        path: of its ``.model`` file.
    """

    def __init__(self, path: Path) -> None:
        self._model = pieces.Pieces(path)
        self._pieces = self._model.names

    def encode(self, lines: list[str]) -> Pieces:
        """Return the numbers of each line's pieces."""
        encoded: Pieces = self._model.model.encode([" ".join(line.split()) for line in lines])
        return encoded

    def write(self, path: Path, lines: Pieces) -> dict[str, int]:
        """Write pieces as text for fairseq-preprocess; return their number, and that of <unk>."""
        with open(path, "w", encoding="utf-8") as file:
            for line in lines:
                file.write(" ".join(self._pieces[number] for number in line) + "\n")
        unknown = sum(line.count(UNKNOWN) for line in lines)
        return {"pieces": sum(map(len, lines)), "unknown": unknown}

    def write_dictionary(self, path: Path, lines: Iterable[list[int]]) -> None:
        """Write fairseq's dictionary: the pieces in the model's order, and how many there are.

        The special symbols are left out, because fairseq puts them first by itself.
        """
        counts = Counter(number for line in lines for number in line)
        with open(path, "w", encoding="utf-8") as file:
            for number, piece in enumerate(self._pieces[SPECIAL:], start=SPECIAL):
                file.write(f"{piece} {counts[number]}\n")
