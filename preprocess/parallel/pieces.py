"""Trains or loads sentencepiece models whose ids are those of fairseq's dictionary.

Models trained here only reduce white space to single spaces and change nothing else, so joined
pieces are the original text. Characters that the training text lacks become ``<unk>``.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from fairseq.data import Dictionary

from fairseq_posenc.errors import UserError
from fairseq_posenc.tokens.files import read_bytes
from fairseq_posenc.tokens.pieces import Pieces, learn_pieces

PieceIds = list[list[int]]  # for each line the ids of its pieces
VOCABULARY = "vocab.json"  # in the folder of the source language's model
_SYMBOLS = ("<s>", "<pad>", "</s>", "<unk>")  # fairseq's special symbols, in its order
UNKNOWN = _SYMBOLS.index("<unk>")
NUM_SPECIAL = len(_SYMBOLS)


def train_model(lines: Iterable[str], vocab_size: int, model_type: str, threads: int) -> bytes:
    """Train a sentencepiece model, ``bpe`` or ``unigram``; return the content of its file.

    ``vocab_size`` includes the four special symbols.

    Raises:
        UserError: the text has too few or too many different pieces for that size.
    """
    model = io.BytesIO()
    learn_pieces(
        vocab_size,
        sentence_iterator=(" ".join(line.split()) for line in lines),
        model_writer=model,
        model_type=model_type,
        character_coverage=1.0,
        normalization_rule_name="identity",
        num_threads=threads,
        bos_id=0,
        pad_id=1,
        eos_id=2,
        unk_id=UNKNOWN,
    )
    return model.getvalue()


class SubwordEncoder:
    """Encodes text with a trained model.

    Args:
        path: the ``.model`` file.
        vocabulary: pieces in the order of their ids, fairseq's symbols first; by default those of a
            model of :func:`train_model`. Pieces that it lacks become ``<unk>``, as in opus-mt.

    Raises:
        UserError: the file is not a model, or the vocabulary has none of its pieces.
    """

    def __init__(self, path: Path, vocabulary: list[str] | None = None) -> None:
        self._model = Pieces(path)
        self._pieces = vocabulary or self._model.texts
        ids = {piece: number for number, piece in enumerate(self._pieces)}
        # fairseq's id of each piece of the model
        self._ids = [ids.get(piece, UNKNOWN) for piece in self._model.texts]
        if max(self._ids) < NUM_SPECIAL:
            raise UserError(f"{path}: none of its pieces is in {VOCABULARY}")

    def encode(self, lines: Sequence[str], threads: int) -> PieceIds:
        """Encode each line as ids."""
        texts = [" ".join(line.split()) for line in lines]
        numbers = self._model.encode(texts, num_threads=threads)
        return [[self._ids[number] for number in line] for line in numbers]

    def build_dictionary(self, lines: Iterable[Sequence[int]]) -> Dictionary:
        """Build fairseq's dictionary: pieces in the model's order, with their counts."""
        counts = Counter(number for line in lines for number in line)
        dictionary = Dictionary()
        for number, piece in enumerate(self._pieces[NUM_SPECIAL:], start=NUM_SPECIAL):
            dictionary.add_symbol(piece, n=counts[number])
        return dictionary


class TrainedPieces:
    """The sentencepiece models of ``--sentencepiece-model``: two languages, a common vocabulary.

    They have the format of Helsinki-NLP's translation models (opus-mt): ``source.spm``,
    ``target.spm``, and ``vocab.json``, which maps the pieces of both to ids. fairseq's dictionary
    has its four special symbols, then these pieces in the same order.

    Raises:
        UserError: a file is missing or broken.
    """

    def __init__(self, source: Path, target: Path) -> None:
        self.paths = (source, target, source.with_name(VOCABULARY))
        *self.models, self._vocabulary = map(read_bytes, self.paths)
        self.pieces = [*_SYMBOLS, *(name for name in self._read_pieces() if name not in _SYMBOLS)]
        self.encoders = SubwordEncoder(source, self.pieces), SubwordEncoder(target, self.pieces)

    def _read_pieces(self) -> list[str]:
        """Read the pieces of the vocabulary in the order of their numbers."""
        try:
            numbers = json.loads(self._vocabulary)
            pieces: list[str] = sorted(numbers, key=numbers.__getitem__)
            is_whole = sorted(numbers.values()) == list(range(len(pieces)))
        except (ValueError, TypeError, AttributeError, RecursionError):
            is_whole = False
        if not is_whole:
            raise UserError(
                f"{self.paths[-1]}: not a vocabulary, which gives each piece a number from 0 on"
            )
        return pieces
