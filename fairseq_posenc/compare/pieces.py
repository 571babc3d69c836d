"""Sentencepieces: the subword units that the models read."""

from __future__ import annotations

import re
from pathlib import Path

from fairseq_posenc.errors import UserError

# fairseq has words of these names; kept out of the text, or fairseq would take text for them.
_FAIRSEQ_SYMBOLS = ["<pad>", "<mask>"]
_LONGEST_LINE = 1 << 20


def train_pieces(text: Path, prefix: Path, vocab_size: int) -> None:
    """Learn sentencepieces from a text file and write ``PREFIX.model`` and ``PREFIX.vocab``.

    Raises:
        UserError: the text does not support that many pieces, or needs more.
    """
    import sentencepiece

    try:
        sentencepiece.SentencePieceTrainer.train(
            input=str(text),
            model_prefix=str(prefix),
            vocab_size=vocab_size,
            control_symbols=_FAIRSEQ_SYMBOLS,
            max_sentence_length=_LONGEST_LINE,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise UserError(_explain(str(error), vocab_size)) from None


def _explain(message: str, vocab_size: int) -> str:
    if found := re.search(r"too high.*<= (\d+)", message):
        return (
            f"--vocab-size {vocab_size}: the text is too short or too uniform for so many "
            f"sentencepieces; use --vocab-size {found[1]} at most, or more text"
        )
    if found := re.search(r"smaller than required_chars.*?(\d+) vs (\d+)", message):
        return (
            f"--vocab-size {vocab_size}: too small for the different characters of the text; "
            f"use --vocab-size {found[2]} or more"
        )
    return f"sentencepiece could not learn from the text: {' '.join(message.split())}"


def encode(model: Path, text: Path, pieces: Path) -> int:
    """Write a text's pieces, separated by spaces, line by line; return their number."""
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    count = 0
    with open(text, encoding="utf-8") as lines, open(pieces, "w", encoding="utf-8") as output:
        for line in lines:
            # By way of the numbers: rare characters become <unk>, not words of their own.
            encoded = [processor.id_to_piece(piece) for piece in processor.encode(line.strip())]
            output.write(" ".join(encoded) + "\n")
            count += len(encoded)
    return count
