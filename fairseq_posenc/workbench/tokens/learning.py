"""Trains sentencepieces; error messages say which option to change."""

from __future__ import annotations

import re
from typing import Any

from fairseq_posenc.errors import UserError

_LONGEST_LINE = 1 << 20  # bytes; sentencepiece's own limit would leave out lines without a word


def learn_pieces(vocab_size: int, **options: Any) -> None:
    """Train a sentencepiece model, with options of sentencepiece's trainer.

    Raises:
        UserError: the text has too few or too many different pieces for that size.
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
