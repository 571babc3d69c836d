"""Sentencepieces: the subword units that the models read."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

from fairseq_posenc.workbench.tokens.pieces import Pieces, learn_pieces

# fairseq has words of these names; kept out of the text, or fairseq would take text for them.
_FAIRSEQ_SYMBOLS = ["<pad>", "<mask>"]


def train_pieces(text: Path, prefix: Path, vocab_size: int) -> None:
    """Learn sentencepieces from a text file and write ``PREFIX.model`` and ``PREFIX.vocab``.

    Raises:
        UserError: the text does not support that many pieces, or needs more.
    """
    learn_pieces(
        vocab_size, input=str(text), model_prefix=str(prefix), control_symbols=_FAIRSEQ_SYMBOLS
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


def unigram_perplexity(train: Path, valid: Path) -> float:
    """Compute the perplexity of a model that knows only how often each piece of ``train`` occurs.

    Frequencies are smoothed by one; as in fairseq every line ends with one more symbol.
    """
    counts, wanted = (Counter(_read_symbols(path)) for path in (train, valid))
    total = sum(counts.values()) + len(counts | wanted)
    loss = sum(n * math.log(total / (counts[piece] + 1)) for piece, n in wanted.items())
    return math.exp(loss / sum(wanted.values()))


def _read_symbols(path: Path) -> list[str]:
    """Read the pieces of a file, with the end of each line."""
    with open(path, encoding="utf-8") as lines:
        return [symbol for line in lines for symbol in (*line.split(), "</s>")]
