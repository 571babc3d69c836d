"""Writes the tokenizers of a model for CTranslate2, and formats Python lines that use them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

from fairseq_posenc.workbench.convert.exchange import hf_tokenizer
from fairseq_posenc.workbench.convert.exchange.config_json import build_generation_config
from fairseq_posenc.workbench.loading.open_model import OpenModel


class Usage(NamedTuple):
    """Python that uses a tokenizer, with fields to fill in."""

    tokenize: str  # expression that splits {text} into pieces
    join: str  # expression that joins {pieces}
    import_line: str = ""
    open_file: str = ""


_SENTENCEPIECE = Usage(
    tokenize='{source}.encode("{text}", out_type=str)',
    join="{target}.decode({pieces})",
    import_line="import sentencepiece",
    open_file='sentencepiece.SentencePieceProcessor(model_file="FOLDER/{file}")',
)
_TOKENIZERS = Usage(
    tokenize='{source}.encode("{text}", add_special_tokens=False).tokens',
    join="{target}.decode([{target}.token_to_id(piece) for piece in {pieces}])",
    import_line="from tokenizers import Tokenizer",
    open_file='Tokenizer.from_file("FOLDER/{file}")',
)
_NO_TOKENIZER = Usage(tokenize='"{text}".split()', join='" ".join({pieces})')
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
    file: str  # name of the tokenizer's file; "" for none
    usage: Usage


def write_tokenizers(trained: OpenModel, tokens: str | None, folder: Path) -> list[TextSide]:
    """Write the tokenizer of each dictionary of a model into a folder.

    Args:
        trained: the model.
        tokens: value of ``--tokens``; None to find a tokenizer in the folder of the data.
        folder: the folder to write to.

    Raises:
        UserError: there is no tokenizer, or a file cannot be read.
    """
    translates = trained.family.name == "translation"
    sides: list[TextSide] = []
    for name, dictionary in trained.dictionaries.items():
        language = name.split(".")[1] if translates else ""
        tokenization = hf_tokenizer.find_tokenization(tokens, trained.data, language)
        if isinstance(tokenization, Path) and tokenization.is_file():
            shutil.copyfile(tokenization, folder / tokenization.name)
            sides.append(TextSide(list(dictionary.symbols), tokenization.name, _SENTENCEPIECE))
        elif tokenization == "none":
            sides.append(TextSide(list(dictionary.symbols), "", _NO_TOKENIZER))
        else:
            file = f"tokenizer.{language}.json" if translates else "tokenizer.json"
            template = trained.family.name
            tokenizer, _ = hf_tokenizer.build_tokenizer(tokenization, dictionary, template)
            tokenizer.save(str(folder / file))
            # The symbols of GPT-2's dictionary are ids; replace them by pieces.
            symbols = [tokenizer.id_to_token(number) for number in range(len(dictionary))]
            sides.append(TextSide(symbols, file, _TOKENIZERS))
    return sides


def format_usage(trained: OpenModel, sides: list[TextSide]) -> str:
    """Format Python lines that run the model with CTranslate2 and its tokenizers."""
    source, target = sides[0], sides[-1]
    usage = source.usage
    names = ("source", "source" if source.file == target.file else "target")
    lines = [*filter(None, ("import ctranslate2", usage.import_line)), ""]
    if source.file:  # a file that both sides use is opened once
        files = {names[0]: source.file, names[1]: target.file}
        lines += [f"{name} = {usage.open_file.format(file=file)}" for name, file in files.items()]
    tokenized = usage.tokenize.format(source=names[0], text="Un homme dort.")
    if trained.family.name == "translation":
        joined = usage.join.format(target=names[1], pieces="translation")
        # max_new_tokens includes </s>, the limit of CTranslate2 does not.
        longest = build_generation_config(trained)["max_new_tokens"] - 1
        lines.append(_TRANSLATION.format(tokenized=tokenized, joined=joined, longest=longest))
    else:
        joined = usage.join.format(target=names[1], pieces="result.sequences[0]")
        start = "<s>" if trained.settings.task.get("add_bos_token") else "</s>"
        lines.append(_CAUSAL_LM.format(start=start, tokenized=tokenized, joined=joined))
    return "\n".join(lines)
