"""Building of fast tokenizers (library tokenizers) whose ids are those of a fairseq dictionary."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Optional

from fairseq.data import Dictionary
from sentencepiece import SentencePieceProcessor
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from tokenizers import pre_tokenizers as splits
from tokenizers.processors import TemplateProcessing

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.running.folders import read_plan
from fairseq_posenc.workbench.tokens.tokenizer import ENCODER, MERGES

SPACE = "▁"
WAYS = ("words", "characters", "none")
# Special tokens around a sentence and around a pair, as fairseq's tasks add them.
TEMPLATES = {
    "masked_lm": ("<s> $A </s>", "<s> $A </s> </s> $B </s>"),
    "causal_lm": ("</s> $A", "</s> $A $B"),
    "causal_lm with <s>": ("<s> $A", "<s> $A $B"),
    "translation": ("$A </s>", "$A $B </s>"),
}


class Text(NamedTuple):
    """A tokenizer and the size of its extra vocabulary."""

    tokenizer: Tokenizer  # of the library tokenizers
    # how many pieces the cutting knows and the dictionary does not. They have numbers behind
    # those of the dictionary, which an exported model reads as `<unk>`, as fairseq does
    unknown: int


def find_way(given: Optional[str], folder: Path, language: str) -> Path | str:
    """Find the tokenization of a model's text: a file, a folder, or one of :data:`WAYS`.

    Args:
        given: value of ``--tokens``; None to search ``folder``.
        folder: directory with the data.
        language: of the text; "" for a language model.

    Raises:
        UserError: there are no tokenizer files, and the data's manifest names none.
    """
    if given in WAYS:
        return given
    place = folder if given is None else Path(given)
    names = (f"sentencepiece.{language}.model", "sentencepiece.model")
    if found := next((place / name for name in names if (place / name).is_file()), None):
        return found
    if (place / ENCODER).is_file() or place.is_file():
        return place
    options = (read_plan(place) or {}).get("options", {})
    if way := next((way for way in ("words", "characters") if options.get(way)), None):
        return way
    raise UserError(
        f"{place}: holds no sentencepiece.model, and no {ENCODER} and {MERGES}: say with --tokens "
        "the tokenizer: a sentencepiece model, the folder of those two files, words, "
        "characters, or none for an export without a tokenizer"
    )


def build(way: Path | str, dictionary: Dictionary, template: str) -> Text:
    """Build the tokenizer of a tokenization found by :func:`find_way`, other than ``none``.

    Ids are those of the dictionary; ``template`` is a key of :data:`TEMPLATES`.

    Raises:
        UserError: a file cannot be read.
    """
    try:
        if isinstance(way, str):
            text = _of_words(way, dictionary)
        elif way.is_dir():
            text = _of_bytes(way, dictionary)
        else:
            text = _of_pieces(way, dictionary)
    except (OSError, ValueError, RuntimeError, AttributeError, TypeError) as error:
        raise UserError(f"{way}: {' '.join(str(error).split())}") from None
    single, pair = TEMPLATES[template]
    numbers = {name: dictionary.index(name) for name in ("<s>", "</s>")}
    text.tokenizer.post_processor = TemplateProcessing(
        single=single, pair=pair, special_tokens=list(numbers.items())
    )
    names = ["<s>", "<pad>", "</s>", "<unk>"]
    text.tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    if "<mask>" in dictionary.indices:
        # As fairseq's fill_mask, it takes the space before it.
        text.tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True)])
    return text


def _of_bytes(folder: Path, dictionary: Dictionary) -> Text:
    """Build GPT-2's BPE, for a dictionary of the numbers in encoder.json."""
    numbers = json.loads((folder / ENCODER).read_text(encoding="utf-8"))
    names = {str(number): piece for piece, number in numbers.items()}
    own = {names.get(symbol, symbol): number for symbol, number in dictionary.indices.items()}
    vocabulary = _with(own, numbers)
    lines = (folder / MERGES).read_text(encoding="utf-8").splitlines()[1:]
    merges = [(left, right) for left, right in (line.split() for line in lines if line)]
    tokenizer = _bpe(vocabulary, merges, fuse_unk=False)
    tokenizer.pre_tokenizer = splits.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return Text(tokenizer, len(vocabulary) - len(own))


def _of_pieces(path: Path, dictionary: Dictionary) -> Text:
    """Build a sentencepiece model's tokenizer, for a dictionary of its pieces."""
    model = SentencePieceProcessor(model_file=str(path))
    numbers = range(model.get_piece_size())
    scores = {
        model.id_to_piece(number): model.get_score(number)
        for number in numbers
        if not (model.is_control(number) or model.is_unknown(number))
    }
    vocabulary = _with(dictionary.indices, scores)
    is_bpe, normalization = _read_settings(model)
    if is_bpe:
        ranked = sorted(scores, key=lambda piece: -scores[piece])
        merges = [(piece[:i], piece[i:]) for piece in ranked for i in range(1, len(piece))]
        tokenizer = _bpe(vocabulary, merges, fuse_unk=True)
    else:
        lowest = min(scores.values()) - 100.0  # of symbols that no text has
        pieces = [(symbol, scores.get(symbol, lowest)) for symbol in vocabulary]
        tokenizer = Tokenizer(models.Unigram(pieces, dictionary.unk(), False))
    steps = [normalizers.Precompiled(normalization)] if normalization else []
    strip = [normalizers.Strip(), normalizers.Replace(Regex(r"\s+"), " ")]
    tokenizer.normalizer = normalizers.Sequence([*steps, *strip])
    tokenizer.pre_tokenizer = splits.Metaspace(SPACE, "always")
    tokenizer.decoder = decoders.Metaspace(SPACE, "always")
    return Text(tokenizer, len(vocabulary) - len(dictionary))


def _of_words(way: str, dictionary: Dictionary) -> Text:
    """Build a tokenizer of words, or of characters."""
    tokenizer = Tokenizer(models.WordLevel(dict(dictionary.indices), "<unk>"))
    if way == "words":
        tokenizer.pre_tokenizer = splits.WhitespaceSplit()
        return Text(tokenizer, 0)
    keeps_spaces = SPACE in dictionary.indices
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Strip(), normalizers.Replace(Regex(r"\s+"), SPACE if keeps_spaces else "")]
    )
    tokenizer.pre_tokenizer = splits.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.Fuse()])
    return Text(tokenizer, 0)


def _with(own: dict[str, int], pieces: Iterable[str]) -> dict[str, int]:
    """Build a vocabulary: the dictionary's symbols by id, then the pieces that it lacks."""
    more = [piece for piece in pieces if piece not in own]
    ordered = sorted(own, key=lambda symbol: own[symbol])
    return {symbol: number for number, symbol in enumerate([*ordered, *more])}


def _bpe(vocabulary: dict[str, int], merges: list[tuple[str, str]], fuse_unk: bool) -> Tokenizer:
    """Build a BPE model, without merges whose pieces are not in the vocabulary."""
    known = [m for m in merges if vocabulary.keys() >= {m[0], m[1], m[0] + m[1]}]
    return Tokenizer(models.BPE(vocabulary, known, unk_token="<unk>", fuse_unk=fuse_unk))


def _read_settings(model: SentencePieceProcessor) -> tuple[bool, bytes]:
    """Read from the protobuf whether a model is BPE, and its normalization table (charsmap).

    sentencepiece has no API for them. Field numbers are those of ``sentencepiece_model.proto``.

    Raises:
        ValueError: the model is neither unigram nor BPE, or uses byte fallback.
    """
    parts: dict[int, Any] = dict(_fields(model.serialized_model_proto()))  # the last of each
    trainer, normalizer = (dict[int, Any](_fields(parts.get(number, b""))) for number in (2, 3))
    if trainer.get(3, 1) not in (1, 2) or trainer.get(35):
        raise ValueError("neither unigram nor BPE pieces, or single bytes for what is unknown")
    return trainer.get(3, 1) == 2, normalizer.get(2, b"")


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the field numbers and values of a protobuf message; all but varints as bytes."""
    place = 0

    def number() -> int:  # reads a varint
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
