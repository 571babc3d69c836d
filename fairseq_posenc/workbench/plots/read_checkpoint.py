"""Captures the attention of a fairseq model to a text, with a label for each token."""

import re
from collections.abc import Iterable
from pathlib import Path

import torch
from fairseq.data import Dictionary
from fairseq.dataclass.configs import GenerationConfig
from torch import Tensor

from fairseq_posenc.errors import UserError, shortened
from fairseq_posenc.folders import checksum
from fairseq_posenc.tokens.tokenizer import ENCODER_JSON, PIECES, SPACE
from fairseq_posenc.transformer.capture_attention import capture_attention
from fairseq_posenc.workbench.loading.open_model import OpenModel, find_pieces, load_tokenizer
from fairseq_posenc.workbench.plots.inspection import TextAttention, refuse_long_text

Token = tuple[int, str]  # its id in the dictionary, and its text


def read_with_checkpoint(opened: OpenModel, text: str, target: str | None = None) -> TextAttention:
    """Run a model on a raw text, as a batch of one, and capture its attention.

    For a translation model the text is the source, and its decoder reads the translation after
    ``</s>``; without a ``target`` the model translates the text by beam search.

    Raises:
        UserError: a text has no token of the dictionary or is too long for the model, or a target
            was given for a model that does not translate.
    """
    task = opened.task
    symbols = task.source_dictionary
    language = task.cfg.source_lang if opened.family == "translation" else ""
    tokens = tokenize(text, "--text", opened.data, symbols, language)
    begin, end = label_tokens([symbols.bos(), symbols.eos()], symbols)
    if opened.family == "translation":
        texts = {"encoder": [*tokens, end]}
        source = _make_batch(opened, "encoder", texts["encoder"])
        texts["decoder"] = [end, *_translate(opened, source, target)]
    elif target is not None:
        raise UserError(f"--target is for translation, and this is a {opened.title}")
    elif opened.family == "causal_lm":
        # Without --add-bos-token, fairseq's language models read </s> before a text.
        texts = {"decoder": [begin if task.args.add_bos_token else end, *tokens]}
    else:
        texts = {"encoder": [begin, *tokens, end]}
    inputs = [_make_batch(opened, stack, read) for stack, read in texts.items()]
    if opened.family == "translation":
        inputs.insert(1, torch.tensor([inputs[0].size(1)]))  # `src_lengths`, between the two
    captured = capture_attention(opened.model, lambda: opened.model(*inputs))
    labels = {stack: [label for _, label in read] for stack, read in texts.items()}
    path, title = opened.path, opened.title
    return TextAttention(path, checksum(path), title, opened.positions, labels, captured)


def _translate(opened: OpenModel, source: Tensor, target: str | None) -> list[Token]:
    """Tokenize the target or, without one, translate the source, ``(1, S)``, with the model."""
    task = opened.task
    symbols = task.target_dictionary
    if target is not None:
        return tokenize(target, "--target", opened.data, symbols, task.cfg.target_lang)
    generator = task.build_generator([opened.model], GenerationConfig())
    data = task.build_dataset_for_inference([source[0]], [source.size(1)])
    (hypotheses,) = task.inference_step(generator, [opened.model], data.collater([data[0]]))
    return label_tokens(hypotheses[0]["tokens"][:-1].tolist(), symbols)  # the best, without </s>


def _make_batch(opened: OpenModel, stack: str, tokens: list[Token]) -> Tensor:
    """Build a batch of one text, ``(1, T)``.

    Texts too long for fairseq's own position table are refused; our encodings check by themselves.
    """
    module = opened.stacks[stack]
    limit = None if opened.positions[stack] else module.max_positions()  # no spec: fairseq's own
    heads = len(module.layers) * module.layers[0].self_attn.num_heads  # weights of all are kept
    refuse_long_text(f"its {stack}", len(tokens), limit, heads)
    return torch.tensor([[token_id for token_id, _ in tokens]])


def label_tokens(ids: Iterable[int], dictionary: Dictionary) -> list[Token]:
    """Label tokens, known only by their ids, with their symbols; ``SPACE`` is ▁, a space's mark."""
    return [(token_id, dictionary[token_id].strip(SPACE) or SPACE) for token_id in ids]


def tokenize(
    text: str, option: str, folder: Path, dictionary: Dictionary, language: str = ""
) -> list[Token]:
    """Tokenize a raw text with a data-bin's tokenizer; without one, split it at white space.

    Raises:
        UserError: no token of the text is in the dictionary.
    """
    if find_pieces(folder, language) or (folder / ENCODER_JSON).exists():
        token_ids, starts, ends = load_tokenizer(folder, dictionary, language).tokens(text)
        ids = token_ids.tolist()
        labels = [text[start:end].strip() or SPACE for start, end in zip(starts, ends)]
    else:
        labels = re.findall(r"\S+", text)
        ids = [dictionary.index(label) for label in labels]
    if all(token_id == dictionary.unk() for token_id in ids):
        reason = f"no token of it is in the dictionary of {folder}"
        how = f"by {PIECES} or {ENCODER_JSON} there, else at white space"
        raise UserError(f"{option} {shortened(text)!r}: {reason}; a text is split {how}")
    return [
        (token_id, f"{label} (unknown)" if token_id == dictionary.unk() else label)
        for token_id, label in zip(ids, labels)
    ]
