"""Builds tokenizers of the library `tokenizers` with the ids of a fairseq dictionary.

Such a tokenizer runs a normalizer, a pre-tokenizer that may split text at spaces, a model that
splits these parts into pieces with ids, and a post-processor that adds special tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Optional

from fairseq.data import Dictionary
from sentencepiece import SentencePieceProcessor
from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from fairseq_posenc.errors import UserError
from fairseq_posenc.folders import REQUEST
from fairseq_posenc.tokens.symbols import SPACE
from fairseq_posenc.tokens.tokenizer import ENCODER_JSON, MERGES, PIECES
from fairseq_posenc.workbench.loading.open_model import OpenModel

TARGET = "target"  # folder of the target's tokenizer, if it is not the source's
NAMED_TOKENIZATIONS = ("words", "characters", "none")  # `none`: export no tokenizer
_EXPORT_WITHOUT = "use --tokens none to export the model without a tokenizer"
# Special tokens around a sentence and around a pair, as fairseq's tasks add them.
TEMPLATES = {
    "masked_lm": ("<s> $A </s>", "<s> $A </s> </s> $B </s>"),
    "causal_lm": ("</s> $A", "</s> $A $B"),
    "causal_lm with <s>": ("<s> $A", "<s> $A $B"),
    "translation": ("$A </s>", "$A $B </s>"),
}


def find_tokenization(tokens: Optional[str], folder: Path, language: str) -> Path | str:
    """Find the tokenization of a model's text.

    Args:
        tokens: value of ``--tokens``; None to search ``folder``.
        folder: folder with the data.
        language: code of the text's language; "" for a language model.

    Returns:
        A sentencepiece model, a folder with GPT-2's BPE, or one of :data:`NAMED_TOKENIZATIONS`.

    Raises:
        UserError: there are no tokenizer files, and the data's manifest names no tokenization.
    """
    if tokens in NAMED_TOKENIZATIONS:
        return tokens
    path = folder if tokens is None else Path(tokens)
    for name in (f"sentencepiece.{language}.model", PIECES):
        if (path / name).is_file():
            return path / name
    if path.is_file():  # of any name: a sentencepiece model
        return path
    if (path / ENCODER_JSON).is_file():
        return path
    request = path / REQUEST
    options = json.loads(request.read_text())["options"] if request.is_file() else {}
    for name in ("words", "characters"):  # options of the commands that write data
        if options.get(name):
            return name
    raise UserError(
        f"{path}: holds no {PIECES}, and no {ENCODER_JSON} and {MERGES}: say with --tokens "
        "the tokenizer: a sentencepiece model, the folder of those two files, words, "
        "characters, or none for an export without a tokenizer"
    )


def find_template(trained: OpenModel) -> str:
    """Find the key in :data:`TEMPLATES` of the special tokens that a model was trained with."""
    has_bos = trained.family.name == "causal_lm" and trained.settings.task.get("add_bos_token")
    return "causal_lm with <s>" if has_bos else trained.family.name


def build_tokenizer(
    tokenization: Path | str, dictionary: Dictionary, template: str
) -> tuple[Tokenizer, int]:
    """Build a tokenizer.

    Args:
        tokenization: result of :func:`find_tokenization`, but not ``none``.
        dictionary: fairseq's dictionary.
        template: key of :data:`TEMPLATES`.

    Returns:
        The tokenizer, and the number of its pieces that the dictionary lacks, whose ids come after
        those of the dictionary.

    Raises:
        UserError: a file cannot be read.
    """
    try:
        if isinstance(tokenization, str):
            tokenizer = _build_simple(tokenization, dictionary)
        elif tokenization.is_dir():
            tokenizer = _build_gpt2(tokenization, dictionary)
        else:
            tokenizer = _build_sentencepiece(tokenization, dictionary)
    # A JSON file of another form raises AttributeError or TypeError.
    except (OSError, ValueError, RuntimeError, AttributeError, TypeError) as error:
        raise UserError(f"{tokenization}: {' '.join(str(error).split())}") from None
    # Counted before the special tokens, which may be new.
    unknown = tokenizer.get_vocab_size() - len(dictionary)
    single, pair = TEMPLATES[template]
    ids = [(name, dictionary.index(name)) for name in ("<s>", "</s>")]
    tokenizer.post_processor = TemplateProcessing(single=single, pair=pair, special_tokens=ids)
    names = ("<s>", "<pad>", "</s>", "<unk>")
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    if "<mask>" in dictionary.indices:
        # lstrip: as in fairseq's fill_mask, the token includes the space before it.
        tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True)])
    return tokenizer, unknown


def write_tokenizers(trained: OpenModel, tokens: str | None, folder: Path) -> list[str]:
    """Write the tokenizers of a model's dictionaries into its folder; return notes for the user.

    Source and target share one if both their dictionaries and the pieces of their text are equal;
    else that of the target is in the folder ``TARGET``.

    Raises:
        UserError: there is no tokenizer, or it has pieces that a dictionary lacks.
    """
    if tokens == "none":
        return ["no tokenizer"]
    longest = min(stack.max_positions() for stack in trained.stacks.values())
    padding_side = "left" if trained.family.name == "causal_lm" else "right"
    written: list[tuple[Path | str, list[str]]] = []
    for name, dictionary in trained.dictionaries.items():
        language = name.split(".")[1] if trained.translates else ""
        source = find_tokenization(tokens, trained.data, language), dictionary.symbols
        if source in written:
            continue
        tokenizer, unknown = build_tokenizer(source[0], dictionary, find_template(trained))
        if unknown:
            raise UserError(
                f"{trained.data / name}: lacks {unknown:,} pieces of the tokenizer, which fairseq "
                "reads as <unk>, and a tokenizer of transformers cannot: --tokens none exports the "
                "model without a tokenizer"
            )
        _write_tokenizer(folder / TARGET if written else folder, tokenizer, longest, padding_side)
        written.append(source)
    return []


def write_serving_tokenizers(
    trained: OpenModel, tokens: str | None, folder: Path
) -> tuple[tuple[str, str] | None, list[list[str]]]:
    """Write the tokenizer of each dictionary for an engine that reads pieces, not ids.

    Returns:
        The files of the source's and the target's tokenizer, or None without tokenizers; and the
        symbols of each dictionary, as its tokenizer writes them.
    """
    files = []
    vocabularies = []
    for name, dictionary in trained.dictionaries.items():
        language = name.split(".")[1] if trained.translates else ""
        tokenization = find_tokenization(tokens, trained.data, language)
        symbols = list(dictionary.symbols)
        if tokenization != "none":
            tokenizer, _ = build_tokenizer(tokenization, dictionary, find_template(trained))
            files.append(f"tokenizer.{language}.json" if language else "tokenizer.json")
            tokenizer.save(str(folder / files[-1]))
            # The symbols of GPT-2's dictionary are ids; replace them by pieces.
            symbols = [tokenizer.id_to_token(number) for number in range(len(dictionary))]
        vocabularies.append(symbols)
    return (files[0], files[-1]) if files else None, vocabularies


def _write_tokenizer(
    folder: Path, tokenizer: Tokenizer, max_length: int, padding_side: str
) -> None:
    """Write a tokenizer, for a model of ``max_length`` positions, into a new or existing folder."""
    folder.mkdir(exist_ok=True)
    names = {"bos": "<s>", "eos": "</s>", "unk": "<unk>", "pad": "<pad>", "cls": "<s>"}
    settings: dict[str, Any] = {f"{name}_token": token for name, token in names.items()}
    if tokenizer.token_to_id("<mask>") is not None:
        settings["mask_token"] = AddedToken("<mask>", lstrip=True, special=True)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **settings,
        sep_token="</s>",
        model_max_length=max_length,
        padding_side=padding_side,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)


def _build_gpt2(folder: Path, dictionary: Dictionary) -> Tokenizer:
    """Build GPT-2's byte-level BPE; the symbols of the dictionary are ids of encoder.json."""
    gpt2_ids = json.loads((folder / ENCODER_JSON).read_text(encoding="utf-8"))
    pieces = {str(gpt2_id): piece for piece, gpt2_id in gpt2_ids.items()}
    indices = {pieces.get(symbol, symbol): index for symbol, index in dictionary.indices.items()}
    lines = (folder / MERGES).read_text(encoding="utf-8").splitlines()[1:]  # the first: a version
    merges = [(first, second) for first, second in map(str.split, filter(None, lines))]
    tokenizer = _build_bpe(_extend_vocabulary(indices, gpt2_ids), merges, fuse_unk=False)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _build_sentencepiece(path: Path, dictionary: Dictionary) -> Tokenizer:
    """Build the tokenizer of a sentencepiece model; the dictionary has its pieces."""
    model = SentencePieceProcessor(model_file=str(path))
    proto = ModelProto.FromString(model.serialized_model_proto())
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    if trainer.model_type not in (trainer.UNIGRAM, trainer.BPE) or trainer.byte_fallback:
        raise ValueError(
            "a sentencepiece model whose pieces are neither unigram nor BPE, or that splits "
            f"unknown characters into single bytes, is not supported; {_EXPORT_WITHOUT}"
        )
    if trainer.treat_whitespace_as_suffix or not normalizer.escape_whitespaces:
        raise ValueError(
            "a sentencepiece model with spaces at the ends of its pieces, or with spaces that are "
            f"not ▁, is not supported; {_EXPORT_WITHOUT}"
        )
    if trainer.model_type == trainer.BPE and trainer.user_defined_symbols:
        raise ValueError(
            "a sentencepiece model of BPE with user-defined symbols, which are never split, is not "
            f"supported; {_EXPORT_WITHOUT}"
        )
    scores = {
        model.id_to_piece(number): model.get_score(number)
        for number in range(model.get_piece_size())
        if not (model.is_control(number) or model.is_unknown(number))
    }
    vocabulary = _extend_vocabulary(dictionary.indices, scores)
    if trainer.model_type == trainer.BPE:
        # sentencepiece has scores of pieces in place of merges: it merges any two pieces into one
        # that it knows, the one of the highest score first.
        ranked = sorted(scores, key=lambda piece: -scores[piece])
        merges = [(piece[:i], piece[i:]) for piece in ranked for i in range(1, len(piece))]
        tokenizer = _build_bpe(vocabulary, merges, fuse_unk=True)
    else:
        lowest = min(scores.values()) - 100.0  # so that symbols that are no pieces are never chosen
        pieces = [(symbol, scores.get(symbol, lowest)) for symbol in vocabulary]
        tokenizer = Tokenizer(models.Unigram(pieces, dictionary.unk(), byte_fallback=False))
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
    has_inner_spaces = any(SPACE in piece[1:] for piece in scores)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        SPACE, prepend_scheme="never", split=not has_inner_spaces
    )
    tokenizer.decoder = decoders.Sequence(decoding)
    return tokenizer


def _build_simple(unit: str, dictionary: Dictionary) -> Tokenizer:
    """Build a tokenizer of ``words`` or ``characters``."""
    tokenizer = Tokenizer(models.WordLevel(dict(dictionary.indices), "<unk>"))
    if unit == "words":
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return tokenizer
    between = SPACE if SPACE in dictionary.indices else ""
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Strip(), normalizers.Replace(Regex(r"\s+"), between)]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.Fuse()])
    return tokenizer


def _extend_vocabulary(indices: dict[str, int], pieces: Iterable[str]) -> dict[str, int]:
    """Build a vocabulary, in the order of ids: the dictionary's symbols, then pieces it lacks."""
    symbols = dict.fromkeys([*sorted(indices, key=indices.__getitem__), *pieces])
    return {symbol: index for index, symbol in enumerate(symbols)}


def _build_bpe(
    vocabulary: dict[str, int], merges: list[tuple[str, str]], fuse_unk: bool
) -> Tokenizer:
    """Build a BPE model, without merges of pieces that the vocabulary lacks."""
    known = [pair for pair in merges if vocabulary.keys() >= {*pair, "".join(pair)}]
    return Tokenizer(models.BPE(vocabulary, known, unk_token="<unk>", fuse_unk=fuse_unk))
