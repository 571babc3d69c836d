"""Learning sentencepieces, with an error message that says what to change."""

from __future__ import annotations

import re
from typing import Any

from fairseq_posenc.errors import UserError

_LONGEST_LINE = 1 << 20  # bytes; sentencepiece's own limit would leave out lines without a word


def learn_pieces(vocab_size: int, **options: Any) -> None:
    """Learn sentencepieces.

    Args:
        vocab_size: number of pieces.
        **options: sentencepiece's own, among them where the text is, and where to write.

    Raises:
        UserError: the text does not support that many pieces, or needs more.
    """
    import sentencepiece

    try:
        sentencepiece.SentencePieceTrainer.train(
            vocab_size=vocab_size, max_sentence_length=_LONGEST_LINE, minloglevel=2, **options
        )
    except RuntimeError as error:
        raise UserError(_explain(str(error), vocab_size)) from None


def _explain(message: str, vocab_size: int) -> str:
    if found := re.search(r"too high.*<= (\d+)", message):
        return (
            f"--vocab-size {vocab_size}: the text has only {found[1]} sentencepieces; use "
            f"--vocab-size {found[1]} at most, or more text"
        )
    if found := re.search(r"smaller than required_chars.*?(\d+) vs (\d+)", message):
        return (
            f"--vocab-size {vocab_size}: too small for the different characters of the text; "
            f"use --vocab-size {found[2]} or more"
        )
    return f"sentencepiece could not learn from the text: {' '.join(message.split())}"
