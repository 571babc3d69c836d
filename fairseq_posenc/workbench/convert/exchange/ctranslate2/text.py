"""The tokenizers of a served model, and the Python lines that use them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

from fairseq.data import Dictionary

from fairseq_posenc.workbench.convert.exchange import hf_tokenizer
from fairseq_posenc.workbench.loading.open_model import OpenModel

_SENTENCEPIECE = (
    "import sentencepiece",
    'sentencepiece.SentencePieceProcessor(model_file="FOLDER/{file}")',
    '{source}.encode("{text}", out_type=str)',
    "{target}.decode({found})",
)
_TOKENIZERS = (
    "from tokenizers import Tokenizer",
    'Tokenizer.from_file("FOLDER/{file}")',
    '{source}.encode("{text}", add_special_tokens=False).tokens',
    "{target}.decode([{target}.token_to_id(each) for each in {found}])",
)
_NOTHING = ("", "", '"{text}".split()', '" ".join({found})')


class TextSide(NamedTuple):
    """The source or the target: a dictionary and the tokenizer of its text."""

    symbols: list[str]  # of the dictionary, in order, as the tokenizer writes them
    file: str  # name of the tokenizer's file; "" for none
    # lines of Python: import, opening the file, tokenizing a text, joining pieces
    usage: tuple[str, str, str, str]


def write_tokenizers(trained: OpenModel, tokens: str | None, folder: Path) -> list[TextSide]:
    """Write the tokenizer of each dictionary of a model into a folder.

    Args:
        trained: the model.
        tokens: value of ``--tokens``; None to search the folder of the data.
        folder: for the files.

    Raises:
        UserError: the tokenization is not known, or a file cannot be read.
    """
    translates = trained.family.name == "translation"
    found: list[TextSide] = []
    for name, dictionary in trained.dictionaries.items():
        language = name.split(".")[1] if translates else ""
        tokenization = hf_tokenizer.find_tokenization(tokens, trained.data, language)
        if isinstance(tokenization, Path) and tokenization.is_file():
            shutil.copyfile(tokenization, folder / tokenization.name)
            found.append(TextSide(list(dictionary.symbols), tokenization.name, _SENTENCEPIECE))
        elif tokenization == "none":
            found.append(TextSide(list(dictionary.symbols), "", _NOTHING))
        else:
            file = f"tokenizer.{language}.json" if translates else "tokenizer.json"
            found.append(_write_json(tokenization, dictionary, folder / file, trained.family.name))
    return found


def _write_json(
    tokenization: Path | str, dictionary: Dictionary, path: Path, template: str
) -> TextSide:
    """Write a tokenizer.json; the symbols of GPT-2's dictionary, numbers, become its pieces."""
    tokenizer = hf_tokenizer.build_tokenizer(tokenization, dictionary, template).tokenizer
    tokenizer.save(str(path))
    symbols = [tokenizer.id_to_token(number) for number in range(len(dictionary))]
    return TextSide(symbols, path.name, _TOKENIZERS)
