"""Prepares raw text as the input of a fairseq model, with a label for each token in pictures.

Without a translation of the text, a translation model makes one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fairseq.data import Dictionary
from fairseq.dataclass.configs import GenerationConfig
from torch import Tensor

from fairseq_posenc.errors import UserError, shortened
from fairseq_posenc.tokens.pieces import PieceEncoder, Pieces
from fairseq_posenc.tokens.symbols import SPACE, SymbolEncoder, split_words
from fairseq_posenc.tokens.tokenizer import ENCODER_JSON, PIECES, Tokenizer, Tokens
from fairseq_posenc.workbench.loading.dictionaries import load_tokenizer
from fairseq_posenc.workbench.loading.open_model import OpenModel


class TokenizedText(NamedTuple):
    """The tokens of a text."""

    ids: list[int]  # numbers in the dictionary
    labels: list[str]  # the text of each token

    @classmethod
    def from_ids(cls, ids: Iterable[int], dictionary: Dictionary) -> TokenizedText:
        """Label tokens of which only the ids are known with the dictionary's symbols."""
        tokens = list(map(int, ids))
        return cls(tokens, [dictionary[token].strip(SPACE) or SPACE for token in tokens])

    def __add__(self, other: TokenizedText) -> TokenizedText:  # type: ignore[override]
        """Append the tokens that follow."""
        return TokenizedText(self.ids + other.ids, self.labels + other.labels)

    def batch(self) -> Tensor:
        """Build a batch of one, ``(1, T)``."""
        return torch.tensor([self.ids])


class ModelInput(NamedTuple):
    """A text as the input of a model."""

    labels: dict[str, list[str]]  # text of each token, by stack: `encoder`, `decoder`
    run: Callable[[], Any]  # runs the model on the text, for `capture_attention`


def prepare_input(opened: OpenModel, text: str, target: str | None = None) -> ModelInput:
    """Tokenize a raw text for a model, as a batch of one.

    For a translation model the text is the source; without a ``target`` the model translates it by
    beam search.

    Raises:
        UserError: a text has no token of the dictionary or is too long for the model, or a target
            was given for a model that does not translate.
    """
    if target is not None and not opened.translates:
        raise UserError(f"--target is for translation; {opened.path} is a {opened.family.title}")
    task = opened.task
    symbols = task.source_dictionary
    begin, end = (
        TokenizedText.from_ids([token], symbols) for token in (symbols.bos(), symbols.eos())
    )
    if opened.translates:
        source = tokenize(text, "--text", opened.data, symbols, task.cfg.source_lang) + end
        return _read_pair(opened, source, target)
    tokens = tokenize(text, "--text", opened.data, symbols)
    if opened.family.name == "causal_lm":
        # Without its option, fairseq's language models read </s> before a text.
        stack = "decoder"
        tokens = (begin if task.args.add_bos_token else end) + tokens
    else:
        stack = "encoder"
        tokens = begin + tokens + end
    _refuse_long(opened, stack, tokens)
    return ModelInput({stack: tokens.labels}, lambda: _run(opened, tokens.batch()))


def _read_pair(opened: OpenModel, source: TokenizedText, target: str | None) -> ModelInput:
    """Read a source and its translation; the decoder reads the translation after ``</s>``."""
    task = opened.task
    symbols = task.target_dictionary
    _refuse_long(opened, "encoder", source)
    lengths = torch.tensor([len(source.ids)])
    if target is not None:
        output = tokenize(target, "--target", opened.data, symbols, task.cfg.target_lang)
    else:
        generator = task.build_generator([opened.model], GenerationConfig())
        data = task.build_dataset_for_inference([torch.tensor(source.ids)], lengths.tolist())
        with _errors_name_checkpoint(opened):
            ((best, *_),) = task.inference_step(generator, [opened.model], data.collater([data[0]]))
        output = TokenizedText.from_ids(best["tokens"][:-1], symbols)  # without </s>
    tokens = TokenizedText.from_ids([symbols.eos()], symbols) + output
    _refuse_long(opened, "decoder", tokens)
    return ModelInput(
        {"encoder": source.labels, "decoder": tokens.labels},
        lambda: _run(opened, source.batch(), lengths, tokens.batch()),
    )


def _run(opened: OpenModel, *inputs: Tensor) -> Any:
    with _errors_name_checkpoint(opened):
        return opened.model(*inputs)


def _refuse_long(opened: OpenModel, stack: str, tokens: TokenizedText) -> None:
    """Refuse texts too long for fairseq's own position table; our encodings check by themselves."""
    if opened.positions[stack] is not None:
        return
    limit = opened.stacks[stack].max_positions()
    if len(tokens.ids) > limit:
        raise UserError(
            f"{opened.path}: its {stack} reads {limit} tokens, and the text has {len(tokens.ids)}; "
            "give a shorter one"
        )


@contextmanager
def _errors_name_checkpoint(opened: OpenModel) -> Iterator[None]:
    """Begin the model's error messages with the path of its checkpoint."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{opened.path}: {error}") from error


class _WhiteSpaceTokenizer(SymbolEncoder):
    """Tokenizer that splits at white space, as fairseq does with text that is already tokenized."""

    def __init__(self, dictionary: Dictionary) -> None:
        super().__init__(split_words, dictionary)  # the splitter of `encode`, which is inherited

    def tokens(self, text: str) -> Tokens:
        matches = list(re.finditer(r"\S+", text))
        ids = [self.index(word[0]) for word in matches]
        return Tokens.from_spans(text, ids, (word.span() for word in matches))


def tokenize(
    text: str, option: str, folder: Path, dictionary: Dictionary, language: str | None = None
) -> TokenizedText:
    """Tokenize a raw text with a data-bin's tokenizer; without one, split it at white space.

    Raises:
        UserError: no token of the text is in the dictionary.
    """
    of_language = folder / f"sentencepiece.{language}.model"
    tokenizer: Tokenizer = _WhiteSpaceTokenizer(dictionary)
    if language and of_language.exists():
        tokenizer = PieceEncoder(Pieces(of_language), dictionary)
    elif (folder / PIECES).exists() or (folder / ENCODER_JSON).exists():
        tokenizer = load_tokenizer(folder, dictionary)
    tokens = tokenizer.tokens(text)
    unknown = dictionary.unk()
    if all(token == unknown for token in tokens.ids):
        raise UserError(
            f"{option} {shortened(text)!r}: no token of it is in the dictionary of {folder}; a "
            f"text is split by {PIECES} or {ENCODER_JSON} there, and without them at white space"
        )
    labels = [text[start:end].strip() or SPACE for start, end in zip(tokens.starts, tokens.ends)]
    for index, token in enumerate(tokens.ids):
        if token == unknown:
            labels[index] += " (unknown)"
    return TokenizedText(tokens.ids.tolist(), labels)
