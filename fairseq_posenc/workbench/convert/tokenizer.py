"""Builds tokenizers of the library `tokenizers` with the ids of a fairseq dictionary.

Such a tokenizer runs a normalizer, a pre-tokenizer that may split text at spaces, a model that
splits these parts into pieces with ids, and a post-processor that adds special tokens.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fairseq.data import Dictionary
from sentencepiece import SentencePieceProcessor
from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from fairseq_posenc.errors import UserError
from fairseq_posenc.folders import REQUEST
from fairseq_posenc.tokens.tokenizer import ENCODER_JSON, MERGES, PIECES, SPACE
from fairseq_posenc.workbench.loading.open_model import OpenModel, find_pieces

# lstrip: as in fairseq's fill_mask, the token includes the space before it.
_MASK = AddedToken("<mask>", lstrip=True)


def find_tokenization(tokens: str | None, folder: Path, language: str) -> Path | str:
    """Find the tokenization of a model's text.

    Args:
        tokens: value of ``--tokens``, but not ``none``; None to search ``folder``.
        folder: folder with the data.
        language: code of the text's language; "" for a language model.

    Returns:
        A sentencepiece model, a folder with GPT-2's BPE, ``words`` or ``characters``.

    Raises:
        UserError: there are no tokenizer files, and the data's manifest names no tokenization.
    """
    if tokens in ("words", "characters"):
        return tokens
    path = folder if tokens is None else Path(tokens)
    if pieces := find_pieces(path, language):
        return pieces
    if path.is_file() or (path / ENCODER_JSON).is_file():  # a file is a sentencepiece model
        return path
    request = path / REQUEST  # which commands that write data leave in their folder
    options = json.loads(request.read_text())["options"] if request.is_file() else {}
    for name in ("words", "characters"):  # options of these commands
        if options.get(name):
            return name
    known = "a sentencepiece model, the folder of those two files, words, characters or none"
    fault = f"holds no {PIECES}, and no {ENCODER_JSON} and {MERGES}"
    raise UserError(f"{path}: {fault}: name the tokenizer with --tokens: {known}")


def build_tokenizers(trained: OpenModel, tokens: str | None) -> list[Tokenizer]:
    """Build the tokenizer of each of a model's dictionaries; none with ``--tokens none``.

    Args:
        trained: the model.
        tokens: value of ``--tokens``; None to find a tokenizer in the folder of the data.

    Raises:
        UserError: there is no tokenizer, or its files cannot be read.
    """
    if tokens == "none":
        return []
    # Special tokens around a sentence and around a pair, as fairseq's tasks add them.
    single, pair = "$A </s>", "$A $B </s>"
    if trained.family == "masked_lm":
        single, pair = "<s> $A </s>", "<s> $A </s> </s> $B </s>"
    elif trained.family == "causal_lm":
        start = "<s>" if trained.settings.task.get("add_bos_token") else "</s>"
        single, pair = f"{start} $A", f"{start} $A $B"
    tokenizers = []
    for name, dictionary in trained.dictionaries.items():
        language = name.split(".")[1] if trained.head == "translation" else ""  # of `dict.de.txt`
        tokenizer = build_tokenizer(find_tokenization(tokens, trained.data, language), dictionary)
        ids = [(symbol, dictionary.index(symbol)) for symbol in ("<s>", "</s>")]
        tokenizer.post_processor = TemplateProcessing(single=single, pair=pair, special_tokens=ids)
        tokenizers.append(tokenizer)
    return tokenizers


def build_tokenizer(tokenization: Path | str, dictionary: Dictionary) -> Tokenizer:
    """Build a tokenizer; pieces that the dictionary lacks get the ids after its symbols.

    Args:
        tokenization: result of :func:`find_tokenization`; a file that cannot be read is refused.
        dictionary: fairseq's dictionary.
    """
    try:
        if isinstance(tokenization, str):  # words or characters
            return _build_simple(tokenization, dictionary)
        if tokenization.is_dir():
            return _build_gpt2(tokenization, dictionary)
        return _build_sentencepiece(tokenization, dictionary)
    # A JSON file of another form raises AttributeError or TypeError.
    except (OSError, ValueError, RuntimeError, AttributeError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{tokenization}: {reason}; use --tokens none") from None


def write_tokenizers(trained: OpenModel, tokenizers: list[Tokenizer], folder: Path) -> list[str]:
    """Write a model's tokenizers as transformers reads them.

    Args:
        trained: the model.
        tokenizers: the results of :func:`build_tokenizers`.
        folder: folder of the model.

    Returns:
        The folders of the tokenizers, relative to ``folder``; "" is ``folder`` itself. A second one
        is the target's tokenizer's, if it differs from the source's.
    """
    written = dict(zip(("", "target"), tokenizers))  # folder -> tokenizer
    if len(tokenizers) == 2 and tokenizers[0].to_str() == tokenizers[1].to_str():
        del written["target"]
    for name, tokenizer in written.items():
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            bos_token="<s>",
            cls_token="<s>",
            eos_token="</s>",
            sep_token="</s>",
            unk_token="<unk>",
            pad_token="<pad>",
            mask_token=_MASK if tokenizer.token_to_id("<mask>") is not None else None,
            model_max_length=min(stack.max_positions() for stack in trained.stacks.values()),
            padding_side="left" if trained.family == "causal_lm" else "right",
            model_input_names=["input_ids", "attention_mask"],
            clean_up_tokenization_spaces=False,
        ).save_pretrained(folder / name)
    return list(written)


def list_vocabularies(trained: OpenModel, tokenizers: list[Tokenizer]) -> list[list[str]]:
    """List each dictionary's symbols by id; for GPT-2's BPE, pieces instead of their numbers."""
    dictionaries = trained.dictionaries.values()
    if not tokenizers:  # --tokens none
        return [list(dictionary.symbols) for dictionary in dictionaries]
    pairs = zip((x.get_vocab() for x in tokenizers), dictionaries, strict=True)  # symbol -> id
    return [sorted(ids, key=ids.__getitem__)[: len(symbols)] for ids, symbols in pairs]


def _build_gpt2(folder: Path, dictionary: Dictionary) -> Tokenizer:
    """Build GPT-2's byte-level BPE; the symbols of the dictionary are ids of encoder.json."""
    gpt2_ids = json.loads((folder / ENCODER_JSON).read_text(encoding="utf-8"))
    pieces = {str(gpt2_id): piece for piece, gpt2_id in gpt2_ids.items()}
    symbols = [pieces.get(symbol, symbol) for symbol in dictionary.symbols]
    lines = (folder / MERGES).read_text(encoding="utf-8").splitlines()[1:]  # [0]: a version
    merges = [(first, second) for first, second in map(str.split, filter(None, lines))]
    tokenizer = _build_bpe(_extend_vocabulary(symbols, gpt2_ids), merges, fuse_unk=False)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _build_sentencepiece(path: Path, dictionary: Dictionary) -> Tokenizer:
    """Build the tokenizer of a sentencepiece model; the dictionary has its pieces."""
    model = SentencePieceProcessor(model_file=str(path))
    proto = ModelProto.FromString(model.serialized_model_proto())
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    is_bpe = trainer.model_type == trainer.BPE
    is_unigram = trainer.model_type == trainer.UNIGRAM
    unsupported = {
        "whose pieces are neither unigram nor BPE": not (is_bpe or is_unigram),
        "that splits unknown characters into single bytes": trainer.byte_fallback,
        "with spaces at the ends of its pieces": trainer.treat_whitespace_as_suffix,
        "with spaces that are not ▁": not normalizer.escape_whitespaces,
        "of BPE with user-defined symbols": is_bpe and len(trainer.user_defined_symbols) > 0,
    }
    if traits := [trait for trait, has_it in unsupported.items() if has_it]:
        raise ValueError(f"a sentencepiece model {traits[0]} is not supported")
    scores = {x.piece: x.score for x in proto.pieces if x.type not in (x.CONTROL, x.UNKNOWN)}
    vocabulary = _extend_vocabulary(dictionary.symbols, scores)
    if is_bpe:
        # sentencepiece has scores of pieces instead of merges: it merges any two pieces into one
        # that it knows, the one with the highest score first.
        ranked = sorted(scores, key=lambda piece: -scores[piece])
        merges = [(piece[:i], piece[i:]) for piece in ranked for i in range(1, len(piece))]
        tokenizer = _build_bpe(vocabulary, merges, fuse_unk=True)  # as sentencepiece does
    else:
        lowest = min(scores.values()) - 100.0  # so that other symbols are never chosen
        pieces = [(symbol, scores.get(symbol, lowest)) for symbol in vocabulary]
        tokenizer = Tokenizer(models.Unigram(pieces, unk_id=dictionary.unk(), byte_fallback=False))
    steps: list[Any] = []
    if normalizer.precompiled_charsmap:  # the model's own normalization
        steps.append(normalizers.Precompiled(normalizer.precompiled_charsmap))
    if normalizer.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(r"\s+"), " ")]
    decoding: list[Any] = [decoders.Replace(SPACE, " "), decoders.Fuse()]
    if normalizer.add_dummy_prefix:  # Metaspace would add none to a text that begins with a space
        steps.append(normalizers.Prepend(" "))
        decoding.append(decoders.Strip(" ", left=1, right=0))
    tokenizer.normalizer = normalizers.Sequence(steps)
    # Text that is split at spaces would never give a piece with a space inside.
    splits = not any(SPACE in piece[1:] for piece in scores)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="never", split=splits)
    tokenizer.decoder = decoders.Sequence(decoding)
    return tokenizer


def _build_simple(unit: str, dictionary: Dictionary) -> Tokenizer:
    """Build a tokenizer of ``words``, or of ``characters`` if the dictionary has many of them."""
    tokenizer = Tokenizer(models.WordLevel(_extend_vocabulary(dictionary.symbols, ()), "<unk>"))
    if unit == "words":
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return tokenizer
    symbols = dictionary.symbols[dictionary.nspecial :]
    if (characters := sum(len(symbol) == 1 for symbol in symbols)) < len(symbols) / 10:
        raise ValueError(f"only {characters:,} of {len(symbols):,} symbols are characters")
    between = SPACE if SPACE in dictionary.indices else ""  # some dictionaries have no spaces
    join_words = normalizers.Replace(Regex(r"\s+"), between)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Strip(), join_words])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.Fuse()])
    return tokenizer


def _extend_vocabulary(symbols: list[str], pieces: Iterable[str]) -> dict[str, int]:
    """Number the dictionary's symbols, in its order, and then the pieces that it lacks."""
    if surplus := len(symbols) - len(set(symbols)):  # later ids would not be the dictionary's
        raise ValueError(f"the dictionary has pieces of the tokenizer twice ({surplus:,})")
    return {symbol: index for index, symbol in enumerate(dict.fromkeys([*symbols, *pieces]))}


def _build_bpe(
    vocabulary: dict[str, int], merges: list[tuple[str, str]], fuse_unk: bool
) -> Tokenizer:
    """Build BPE from merges of known pieces; ``fuse_unk`` makes unknown neighbors one token."""
    known = [pair for pair in merges if all(x in vocabulary for x in (*pair, "".join(pair)))]
    return Tokenizer(models.BPE(vocabulary, known, unk_token="<unk>", fuse_unk=fuse_unk))
