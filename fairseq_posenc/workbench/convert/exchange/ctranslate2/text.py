"""How the text of a served model is cut into symbols and put together again."""

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


class Side(NamedTuple):
    """The text of a dictionary's language.

    Attributes:
        symbols: by their numbers, as what cuts the text writes them.
        file: that cuts it; "" for none.
        usage: Python: the library, what opens the file, cuts a text, and joins what was found.
    """

    symbols: list[str]
    file: str
    usage: tuple[str, str, str, str]


def write_sides(trained: OpenModel, given: str | None, folder: Path) -> list[Side]:
    """Write what cuts the text of each dictionary of a model.

    Args:
        trained: the model.
        given: what cut its text, as a user says it.
        folder: for the files.

    Raises:
        UserError: nothing tells, or a file cannot be read.
    """
    translates = trained.family.name == "translation"
    found: list[Side] = []
    for name, dictionary in trained.dictionaries.items():
        language = name.split(".")[1] if translates else ""
        way = hf_tokenizer.find_way(given, trained.data, language)
        if isinstance(way, Path) and way.is_file():
            shutil.copyfile(way, folder / way.name)
            found.append(Side(list(dictionary.symbols), way.name, _SENTENCEPIECE))
        elif way == "none":
            found.append(Side(list(dictionary.symbols), "", _NOTHING))
        else:
            file = f"tokenizer.{language}.json" if translates else "tokenizer.json"
            found.append(_with_tokenizer(way, dictionary, folder / file, trained.family.name))
    return found


def _with_tokenizer(way: Path | str, dictionary: Dictionary, path: Path, template: str) -> Side:
    """Write a tokenizer, in whose words a dictionary of numbers becomes one of pieces."""
    tokenizer = hf_tokenizer.build(way, dictionary, template).tokenizer
    tokenizer.save(str(path))
    symbols = [tokenizer.id_to_token(number) for number in range(len(dictionary))]
    return Side(symbols, path.name, _TOKENIZERS)
