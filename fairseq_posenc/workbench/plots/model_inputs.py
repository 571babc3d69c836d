"""Prepares raw text, or random symbols, as the input of a fairseq model whose attention is shown.

Each token has a label for pictures.
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

from fairseq_posenc.analysis.split import CapturedAttention
from fairseq_posenc.errors import UserError, shortened
from fairseq_posenc.folders import checksum
from fairseq_posenc.tokens.pieces import PieceEncoder, Pieces
from fairseq_posenc.tokens.symbols import SPACE
from fairseq_posenc.tokens.tokenizer import ENCODER_JSON, PIECES, Tokenizer
from fairseq_posenc.transformer.capture_attention import capture_attention
from fairseq_posenc.workbench.loading.dictionaries import load_tokenizer
from fairseq_posenc.workbench.loading.open_model import OpenModel
from fairseq_posenc.workbench.plots.inspection import Inspection, refuse_large_page

_SENTENCES = 16  # random sentences that a model reads
_SEED = 1
_SPECIAL_SYMBOLS = 4  # at the beginning of a dictionary


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
        texts = {"encoder": [*tokens, end]}
        source = _make_batch(opened, "encoder", texts["encoder"])
        texts["decoder"] = [end, *_translate(opened, source, target)]
    elif target is not None:
        raise UserError(f"--target is for translation; {opened.path} is a {opened.family.title}")
    elif opened.family.name == "causal_lm":
        # Without its option, fairseq's language models read </s> before a text.
        texts = {"decoder": [begin if task.args.add_bos_token else end, *tokens]}
    else:
        texts = {"encoder": [begin, *tokens, end]}
    inputs = [_make_batch(opened, stack, read) for stack, read in texts.items()]
    if opened.translates:
        inputs.insert(1, torch.tensor([inputs[0].size(1)]))

    def run() -> Any:
        with _errors_name_checkpoint(opened):
            return opened.model(*inputs)

    labels = {stack: [token.label for token in read] for stack, read in texts.items()}
    return ModelInput(labels, run)


def inspect_model(opened: OpenModel, prepared: ModelInput) -> Inspection:
    """Run a model on a text, and collect its quantized attention.

    Raises:
        UserError: the page would be too large, the text is too long for the model, or its
            attention is NaN or infinite.
    """
    heads = 0
    for stack in opened.stacks.values():
        first = stack.layers[0]
        kinds = 2 if getattr(first, "encoder_attn", None) else 1  # of attention in a layer
        heads += len(stack.layers) * kinds * first.self_attn.num_heads
    refuse_large_page(opened.path, heads, prepared.labels)
    captured = capture_attention(opened.model, prepared.run)
    sha256, family = checksum(opened.path), opened.family.title
    return Inspection.build(
        opened.path, sha256, family, opened.positions, captured, prepared.labels
    )


def attention_to_random_symbols(model: Any, length: int) -> list[CapturedAttention]:
    """Capture the attention of a model to random sentences from a fixed seed.

    They have ``length`` tokens, or as many as the model's shortest table has rows.
    """
    generator = torch.Generator().manual_seed(_SEED)
    stacks = [stack for stack in model.modules() if hasattr(stack, "assembly")]
    length = min([length, *(stack.assembly.dims.max_positions for stack in stacks)])
    inputs = [
        torch.randint(
            _SPECIAL_SYMBOLS,
            stack.embed_tokens.num_embeddings,
            (_SENTENCES, length),
            generator=generator,
        )
        for stack in stacks
    ]
    if len(stacks) == 2:  # an encoder also reads the lengths
        inputs.insert(1, torch.full((_SENTENCES,), length))
    return capture_attention(model, lambda: model(*inputs))


def _translate(opened: OpenModel, source: Tensor, target: str | None) -> list[LabelledToken]:
    """Tokenize the target or, without one, translate the source, ``(1, S)``, with the model."""
    task = opened.task
    symbols = task.target_dictionary
    if target is not None:
        return tokenize(target, "--target", opened.data, symbols, task.cfg.target_lang)
    generator = task.build_generator([opened.model], GenerationConfig())
    data = task.build_dataset_for_inference([source[0]], [source.size(1)])
    with _errors_name_checkpoint(opened):
        ((best, *_),) = task.inference_step(generator, [opened.model], data.collater([data[0]]))
    return label_tokens(best["tokens"][:-1].tolist(), symbols)  # without </s>


def _make_batch(opened: OpenModel, stack: str, tokens: list[LabelledToken]) -> Tensor:
    """Build a batch of one text, ``(1, T)``.

    Texts too long for fairseq's own position table are refused; our encodings check by themselves.
    """
    limit = opened.stacks[stack].max_positions()
    if opened.positions[stack] is None and len(tokens) > limit:
        raise UserError(
            f"{opened.path}: its {stack} reads {limit} tokens, and the text has {len(tokens)}; "
            "give a shorter one"
        )
    return torch.tensor([[token.id for token in tokens]])


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
