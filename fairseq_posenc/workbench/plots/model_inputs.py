"""Prepares raw text as the input of a fairseq model, with a label for each token in pictures."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fairseq.data import Dictionary
from fairseq.dataclass.configs import GenerationConfig

from fairseq_posenc.errors import UserError, shortened
from fairseq_posenc.tokens.pieces import PieceEncoder, Pieces
from fairseq_posenc.tokens.symbols import SPACE
from fairseq_posenc.tokens.tokenizer import ENCODER_JSON, PIECES, Tokenizer
from fairseq_posenc.workbench.loading.dictionaries import load_tokenizer
from fairseq_posenc.workbench.loading.open_model import OpenModel


class LabelledToken(NamedTuple):
    """A token of a text."""

    id: int  # number in the dictionary
    label: str  # its text


class ModelInput(NamedTuple):
    """A text as the input of a model."""

    labels: dict[str, list[str]]  # text of each token, by stack: `encoder`, `decoder`
    run: Callable[[], Any]  # runs the model on the text, for `capture_attention`


def prepare_input(opened: OpenModel, text: str, target: str | None = None) -> ModelInput:
    """Tokenize a raw text for a model, as a batch of one.

    For a translation model the text is the source, and its decoder reads the translation after
    ``</s>``; without a ``target`` the model translates the text by beam search.

    Raises:
        UserError: a text has no token of the dictionary or is too long for the model, or a target
            was given for a model that does not translate.
    """
    task = opened.task
    symbols = task.source_dictionary
    language = task.cfg.source_lang if opened.translates else None
    tokens = tokenize(text, "--text", opened.data, symbols, language)
    begin, end = label_tokens([symbols.bos(), symbols.eos()], symbols)
    if opened.translates:
        tokens = [*tokens, end]
        _refuse_long(opened, "encoder", tokens)
        translation = _translate(opened, tokens, target)
        texts = {
            "encoder": tokens,
            "decoder": [*label_tokens([symbols.eos()], symbols), *translation],
        }
    elif target is not None:
        raise UserError(f"--target is for translation; {opened.path} is a {opened.family.title}")
    elif opened.family.name == "causal_lm":
        # Without its option, fairseq's language models read </s> before a text.
        texts = {"decoder": [begin if task.args.add_bos_token else end, *tokens]}
    else:
        texts = {"encoder": [begin, *tokens, end]}
    for stack, read in texts.items():
        _refuse_long(opened, stack, read)
    inputs = [_make_batch(read) for read in texts.values()]
    if opened.translates:
        inputs.insert(1, torch.tensor([len(tokens)]))

    def run() -> Any:
        with _errors_name_checkpoint(opened):
            return opened.model(*inputs)

    labels = {stack: [token.label for token in read] for stack, read in texts.items()}
    return ModelInput(labels, run)


def _translate(
    opened: OpenModel, source: list[LabelledToken], target: str | None
) -> list[LabelledToken]:
    """Tokenize the target or, without one, translate the source with the model."""
    task = opened.task
    symbols = task.target_dictionary
    if target is not None:
        return tokenize(target, "--target", opened.data, symbols, task.cfg.target_lang)
    generator = task.build_generator([opened.model], GenerationConfig())
    data = task.build_dataset_for_inference([_make_batch(source)[0]], [len(source)])
    with _errors_name_checkpoint(opened):
        ((best, *_),) = task.inference_step(generator, [opened.model], data.collater([data[0]]))
    return label_tokens(best["tokens"][:-1].tolist(), symbols)  # without </s>


def _make_batch(tokens: list[LabelledToken]) -> torch.Tensor:
    """Build a batch of one text, ``(1, T)``."""
    return torch.tensor([[token.id for token in tokens]])


def _refuse_long(opened: OpenModel, stack: str, tokens: list[LabelledToken]) -> None:
    """Refuse texts too long for fairseq's own position table; our encodings check by themselves."""
    limit = opened.stacks[stack].max_positions()
    if opened.positions[stack] is None and len(tokens) > limit:
        raise UserError(
            f"{opened.path}: its {stack} reads {limit} tokens, and the text has {len(tokens)}; "
            "give a shorter one"
        )


@contextmanager
def _errors_name_checkpoint(opened: OpenModel) -> Iterator[None]:
    """Begin the model's error messages with the path of its checkpoint."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{opened.path}: {error}") from error


def label_tokens(ids: Iterable[int], dictionary: Dictionary) -> list[LabelledToken]:
    """Label tokens of which only the ids are known with the dictionary's symbols."""
    return [LabelledToken(token, dictionary[token].strip(SPACE) or SPACE) for token in ids]


def tokenize(
    text: str, option: str, folder: Path, dictionary: Dictionary, language: str | None = None
) -> list[LabelledToken]:
    """Tokenize a raw text with a data-bin's tokenizer; without one, split it at white space.

    Raises:
        UserError: no token of the text is in the dictionary.
    """
    of_language = folder / f"sentencepiece.{language}.model"
    tokenizer: Tokenizer | None = None
    if language and of_language.exists():
        tokenizer = PieceEncoder(Pieces(of_language), dictionary)
    elif (folder / PIECES).exists() or (folder / ENCODER_JSON).exists():
        tokenizer = load_tokenizer(folder, dictionary)
    if tokenizer:
        numbers, starts, ends = tokenizer.tokens(text)
        ids = numbers.tolist()
        labels = [text[start:end].strip() or SPACE for start, end in zip(starts, ends)]
    else:
        labels = re.findall(r"\S+", text)
        ids = [dictionary.index(label) for label in labels]
    unknown = dictionary.unk()
    if all(token == unknown for token in ids):
        raise UserError(
            f"{option} {shortened(text)!r}: no token of it is in the dictionary of {folder}; a "
            f"text is split by {PIECES} or {ENCODER_JSON} there, and without them at white space"
        )
    return [
        LabelledToken(token, f"{label} (unknown)" if token == unknown else label)
        for token, label in zip(ids, labels)
    ]
