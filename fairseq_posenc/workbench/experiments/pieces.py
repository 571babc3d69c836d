"""Sentencepieces: the subword units that the models read."""

from __future__ import annotations

from pathlib import Path

from fairseq_posenc.workbench.tokens.learning import learn_pieces
from fairseq_posenc.workbench.tokens.pieces import Pieces

# fairseq has words of these names; kept out of the text, or fairseq would take text for them.
_FAIRSEQ_SYMBOLS = ["<pad>", "<mask>"]


def train_pieces(text: Path, prefix: Path, vocab_size: int) -> None:
    """Learn sentencepieces from a text file and write ``PREFIX.model`` and ``PREFIX.vocab``.

    Raises:
        UserError: the text does not support that many pieces, or needs more.
    """
    learn_pieces(
        vocab_size,
        input=str(text),
        model_prefix=str(prefix),
        control_symbols=_FAIRSEQ_SYMBOLS,
    )


def encode(model: Path, text: Path, pieces: Path) -> int:
    """Write a text's pieces, separated by spaces, line by line; return their number."""
    cut, count = Pieces(model), 0
    with open(text, encoding="utf-8") as lines, open(pieces, "w", encoding="utf-8") as output:
        for line in lines:
            (found,) = cut([line.strip()])
            output.write(" ".join(found) + "\n")
            count += len(found)
    return count
