"""Exports a trained model to a folder that CTranslate2 reads, and compares the two.

CTranslate2 reads and writes text as lists of pieces, so it gets vocabularies and no ids.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import ctranslate2
import torch
from torch import Tensor

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.convert.exchange import hf_tokenizer
from fairseq_posenc.workbench.convert.exchange.config_json import build_generation_config
from fairseq_posenc.workbench.convert.exchange.ctranslate2.specification import build_specification
from fairseq_posenc.workbench.convert.exchange.hf_folder_writer import Labels, write_card
from fairseq_posenc.workbench.convert.random_comparison import (
    MAX_TOKENS,
    SPECIAL_SYMBOLS,
    compute_scores,
    refuse_difference,
)
from fairseq_posenc.workbench.loading.open_model import OpenModel
from fairseq_posenc.workbench.running.folders import create_folder

_TRANSLATION = """translator = ctranslate2.Translator("FOLDER")
(result,) = translator.translate_batch(
    [{tokenized}],
    beam_size=5, max_decoding_length={longest}, return_end_token=True,
)
translation = [piece for piece in result.hypotheses[0] if piece != "</s>"]
print({joined})"""
_CAUSAL_LM = """generator = ctranslate2.Generator("FOLDER")
(result,) = generator.generate_batch(
    [["{start}", *{tokenized}]], max_length=50, sampling_topk=10
)
print({joined})"""


class TextSide(NamedTuple):
    """The source or the target: a dictionary and the tokenizer of its text."""

    symbols: list[str]  # the dictionary's symbols in order, as the tokenizer writes them
    library: str = ""  # ``sentencepiece`` or ``tokenizers``; "" without a tokenizer
    file: str = ""  # name of the tokenizer's file


def export_to_ctranslate2(
    trained: OpenModel, quantization: str, tokens: str | None, out: Path, labels: Labels
) -> list[str]:
    """Write a folder that CTranslate2 reads, compare the two models, and return lines for the user.

    Args:
        trained: the model.
        quantization: ``float32``, ``float16`` or ``int8``.
        tokens: value of ``--tokens``; None to find a tokenizer in the folder of the data.
        out: the folder.
        labels: labels of the model card.

    Raises:
        UserError: CTranslate2 cannot compute the model, or its scores differ.
    """
    if trained.head not in ("translation", "causal_lm"):
        raise UserError(
            f"--to ctranslate2: for translation models and causal LMs, and {trained.path} is "
            "neither: --to hf or --to onnx"
        )
    with create_folder(out) as folder:
        sides = _write_tokenizers(trained, tokens, folder)
        vocabularies = [side.symbols for side in sides]
        largest, _ = _write_and_compare(trained, vocabularies, "float32", folder)
        refuse_difference("--to ctranslate2: log probabilities differ from the model's", largest)
        notes = [f"log probabilities in float32 equal to {largest:.1e} of the largest one"]
        if quantization != "float32":
            _, mean = _write_and_compare(trained, vocabularies, quantization, folder)
            notes.append(
                f"log probabilities in {quantization} are {mean:.1e} from those of float32 in the "
                "mean, of random text"
            )
        if not sides[0].library:
            notes.append("no tokenizer")
        write_card(folder, trained, "ctranslate2", _format_usage(trained, sides), notes, labels)
    return [f"wrote {out}: a model of CTranslate2 in {quantization}", *notes]


def _write_and_compare(
    trained: OpenModel, vocabularies: list[list[str]], quantization: str, folder: Path
) -> tuple[float, float]:
    """Write or replace a model for CTranslate2; return what :func:`_compare_log_probs` does."""
    spec = build_specification(trained, vocabularies)
    spec.optimize(quantization)
    spec.save(str(folder))
    return _compare_log_probs(trained, folder, vocabularies)


@torch.no_grad()
def _compare_log_probs(
    trained: OpenModel, folder: Path, vocabularies: list[list[str]]
) -> tuple[float, float]:
    """Compare log probabilities of random sentences of three lengths, a batch in CTranslate2.

    Return the largest difference, as a share of the largest log probability, and the mean one.
    """
    ids_by_side = [_draw_sentences(stack) for stack in trained.stacks.values()]
    pieces_by_side = []
    for symbols, sentences in zip(vocabularies, ids_by_side):
        pieces_by_side.append([[symbols[i] for i in sentence] for sentence in sentences])
    end = trained.stacks["decoder"].eos_idx
    if trained.translates:
        translator = ctranslate2.Translator(str(folder), inter_threads=1, intra_threads=1)
        results = translator.score_batch(*pieces_by_side, max_input_length=0)  # 0: never cut
    else:
        generator = ctranslate2.Generator(str(folder), inter_threads=1, intra_threads=1)
        symbol = vocabularies[0][end]
        lines = [[symbol, *sentence, symbol] for sentence in pieces_by_side[0]]
        results = generator.score_batch(lines, max_input_length=0)
    theirs = torch.cat([torch.tensor(result.log_probs) for result in results])
    ours = torch.cat([_compute_log_probs(trained, end, *ids) for ids in zip(*ids_by_side)])
    differences = (ours - theirs).abs()
    return float(differences.max() / ours.abs().max()), float(differences.mean())


def _draw_sentences(stack: Any) -> list[list[int]]:
    """Draw three sentences without ``</s>``; the longest fills the positions of the stack."""
    generator = torch.Generator().manual_seed(1)
    symbols: int = stack.embed_tokens.num_embeddings
    longest = min(MAX_TOKENS, stack.assembly.dims.max_positions) - 1
    return [
        torch.randint(SPECIAL_SYMBOLS, symbols, (length,), generator=generator).tolist()
        for length in (longest, longest // 2 + 1, 2)
    ]


def _compute_log_probs(trained: OpenModel, end: int, *sides: list[int]) -> Tensor:
    """Compute the log probabilities ``(T + 1,)`` of a sentence's T symbols and of its end.

    ``sides`` are the sentence, or a source and its translation. fairseq's decoders begin with the
    end.
    """
    *sources, target = sides
    inputs = [torch.tensor([[*source, end]]) for source in sources]
    scores = compute_scores(trained.model, *inputs, torch.tensor([[end, *target]]))[0]
    return scores.log_softmax(-1).gather(1, torch.tensor([*target, end])[:, None])[:, 0]


def _write_tokenizers(trained: OpenModel, tokens: str | None, folder: Path) -> list[TextSide]:
    """Write the tokenizer of each dictionary; ``tokens`` is the value of ``--tokens``."""
    sides: list[TextSide] = []
    for name, dictionary in trained.dictionaries.items():
        language = name.split(".")[1] if trained.translates else ""
        tokenization = hf_tokenizer.find_tokenization(tokens, trained.data, language)
        if isinstance(tokenization, Path) and tokenization.is_file():
            shutil.copyfile(tokenization, folder / tokenization.name)
            sides.append(TextSide(dictionary.symbols, "sentencepiece", tokenization.name))
        elif tokenization == "none":
            sides.append(TextSide(dictionary.symbols))
        else:
            file = f"tokenizer.{language}.json" if language else "tokenizer.json"
            tokenizer, _ = hf_tokenizer.build_tokenizer(
                tokenization, dictionary, hf_tokenizer.find_template(trained)
            )
            tokenizer.save(str(folder / file))
            # The symbols of GPT-2's dictionary are ids; replace them by pieces.
            symbols = [tokenizer.id_to_token(number) for number in range(len(dictionary))]
            sides.append(TextSide(symbols, "tokenizers", file))
    return sides


def _format_usage(trained: OpenModel, sides: list[TextSide]) -> str:
    """Format Python lines that run the model with CTranslate2 and its tokenizers."""
    source, target = sides[0], sides[-1]
    variables = {source.file: "source"}  # tokenizer's file -> variable in the lines
    target_variable = variables.setdefault(target.file, "target")  # "source" for a shared file
    pieces = "translation" if trained.translates else "result.sequences[0]"
    lines = ["import ctranslate2"]
    if source.library == "sentencepiece":
        lines += ["import sentencepiece", ""]
        for file, variable in variables.items():
            opened = f'sentencepiece.SentencePieceProcessor(model_file="FOLDER/{file}")'
            lines.append(f"{variable} = {opened}")
        tokenized = 'source.encode("Un homme dort.", out_type=str)'
        joined = f"{target_variable}.decode({pieces})"
    elif source.library == "tokenizers":
        lines += ["from tokenizers import Tokenizer", ""]
        for file, variable in variables.items():
            lines.append(f'{variable} = Tokenizer.from_file("FOLDER/{file}")')
        tokenized = 'source.encode("Un homme dort.", add_special_tokens=False).tokens'
        ids = f"[{target_variable}.token_to_id(piece) for piece in {pieces}]"
        joined = f"{target_variable}.decode({ids})"
    else:
        lines.append("")
        tokenized = '"Un homme dort.".split()'
        joined = f'" ".join({pieces})'
    if trained.translates:
        # max_new_tokens includes </s>, the limit of CTranslate2 does not.
        longest = build_generation_config(trained)["max_new_tokens"] - 1
        lines.append(_TRANSLATION.format(tokenized=tokenized, joined=joined, longest=longest))
    else:
        start = "<s>" if trained.settings.task.get("add_bos_token") else "</s>"
        lines.append(_CAUSAL_LM.format(start=start, tokenized=tokenized, joined=joined))
    return "\n".join(lines)
