"""Text as an opened model reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Optional

import torch
from fairseq.dataclass.configs import GenerationConfig
from torch import Tensor

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.loading.open_model import OpenModel
from fairseq_posenc.workbench.plots.tokenize import TokenizedText, tokenize

_BEAM = 5


class Reading(NamedTuple):
    """A text as a model reads it.

    Attributes:
        labels: what of the text each token is, by stack: ``encoder``, ``decoder``.
        run: makes a forward pass, for :func:`~fairseq_posenc.transformer.capture_attention.watch`.
    """

    labels: dict[str, list[str]]
    run: Callable[[], Any]


def read_text(opened: OpenModel, text: str, target: Optional[str] = None) -> Reading:
    """Return a text as a model reads it, batch of one.

    Args:
        opened: the model.
        text: raw; of a translation model, the source.
        target: raw, of a translation model; None for its own translation, by beam search.

    Raises:
        UserError: a text has no symbol that the model knows, or is longer than the model can read,
            or there is a target although the model does not translate.
    """
    if target is not None and opened.family.name != "translation":
        raise UserError(f"--target is for translation; {opened.path} is a {opened.family.title}")
    task, symbols = opened.task, opened.task.source_dictionary
    begin, end = (TokenizedText.of_ids([each], symbols) for each in (symbols.bos(), symbols.eos()))
    if opened.family.name == "translation":
        source = tokenize(text, "--text", opened.data, symbols, task.cfg.source_lang) + end
        return _pair(opened, source, target)
    found = tokenize(text, "--text", opened.data, symbols)
    if opened.family.name == "causal_lm":
        return _single(opened, "decoder", (begin if task.args.add_bos_token else end) + found)
    return _single(opened, "encoder", begin + found + end)


def _single(opened: OpenModel, stack: str, tokens: TokenizedText) -> Reading:
    _refuse_long(opened, stack, tokens)
    return Reading({stack: tokens.labels}, lambda: _run(opened, _batch(tokens)))


def _pair(opened: OpenModel, source: TokenizedText, target: Optional[str]) -> Reading:
    """Return a source and what the decoder reads of its translation: a start, and all of it."""
    task, symbols = opened.task, opened.task.target_dictionary
    _refuse_long(opened, "encoder", source)
    if target is None:
        output = _translated(opened, source)
    else:
        output = tokenize(target, "--target", opened.data, symbols, task.cfg.target_lang)
    tokens = TokenizedText.of_ids([symbols.eos()], symbols) + output
    _refuse_long(opened, "decoder", tokens)
    lengths = torch.tensor([len(source.ids)])
    return Reading(
        {"encoder": source.labels, "decoder": tokens.labels},
        lambda: _run(opened, _batch(source), lengths, _batch(tokens)),
    )


def _translated(opened: OpenModel, source: TokenizedText) -> TokenizedText:
    generator = opened.task.build_generator([opened.model], GenerationConfig(beam=_BEAM))
    data = opened.task.build_dataset_for_inference([_batch(source)[0]], [len(source.ids)])
    with _telling(opened):
        ((best, *_),) = opened.task.inference_step(
            generator, [opened.model], data.collater([data[0]])
        )
    return TokenizedText.of_ids(best["tokens"][:-1], opened.task.target_dictionary)


def _run(opened: OpenModel, *inputs: Tensor) -> Any:
    with _telling(opened):
        return opened.model(*inputs)


def _batch(tokens: TokenizedText) -> Tensor:
    return torch.tensor([tokens.ids])


def _refuse_long(opened: OpenModel, stack: str, tokens: TokenizedText) -> None:
    """Refuse what a table of fairseq's own has no position for; our encodings know themselves."""
    if opened.positions[stack] is not None:
        return
    limit = opened.stacks[stack].max_positions()
    if len(tokens.ids) > limit:
        raise UserError(
            f"{opened.path}: its {stack} reads {limit} tokens, and the text has {len(tokens.ids)}; "
            "give a shorter one"
        )


@contextmanager
def _telling(opened: OpenModel) -> Iterator[None]:
    """Name the checkpoint in what its model refuses."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{opened.path}: {error}") from error
