"""What a sentencepiece model does, which its library does not tell: read from the file itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from sentencepiece import SentencePieceProcessor


class Settings(NamedTuple):
    """What a model does.

    Attributes:
        is_bpe: whether it merges pairs, and else draws pieces.
        characters: how they are normalised.
    """

    is_bpe: bool
    characters: bytes


def settings_of(model: SentencePieceProcessor) -> Settings:
    """Return what a sentencepiece model does not tell otherwise.

    Raises:
        ValueError: it does what cannot be done here.
    """
    parts: dict[int, Any] = dict(_fields(model.serialized_model_proto()))  # the last of each
    trainer, normalizer = (dict[int, Any](_fields(parts.get(number, b""))) for number in (2, 3))
    if trainer.get(3, 1) not in (1, 2) or trainer.get(35):
        raise ValueError("neither unigram nor BPE pieces, or single bytes for what is unknown")
    return Settings(trainer.get(3, 1) == 2, normalizer.get(2, b""))


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the numbers and values of a message of protocol buffers; fixed-size ones as bytes."""
    place = 0

    def number() -> int:
        nonlocal place
        found, shift = 0, 0
        while True:
            byte = message[place]
            place += 1
            found |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return found

    while place < len(message):
        key = number()
        kind = key & 7
        if kind == 0:
            yield key >> 3, number()
            continue
        size = number() if kind == 2 else {1: 8, 5: 4}[kind]
        place += size
        yield key >> 3, message[place - size : place]
