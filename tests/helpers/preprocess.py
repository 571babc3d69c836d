"""Runs the programs of preprocess/ in this process, and writes the files that they need."""

from __future__ import annotations

import itertools
import json
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import sentencepiece
from fairseq.data.encoders import gpt2_bpe_utils
from tokenizers import ByteLevelBPETokenizer

from binarize import command, options
from binarize.formats import LineFormat
from fairseq_posenc.workbench import preprocessing
from fairseq_posenc.workbench.running.options import Parser

PROGRAMS = Path(__file__).parents[2] / "preprocess"
DATA = PROGRAMS.parents[1] / "shared" / "data"  # published files, not there everywhere
published = pytest.mark.skipif(not DATA.is_dir(), reason="the published files are not here")
WORDS = ["red", "blue", "green", "a", "bird", "sees", "the", "old", "tree", "and", "sings", "it"]
BIRDS = "the old tree sings of a red bird"
ASKED = {"question": "which bird sings?", "answers": ["red bird"]}


def start(name: str, *words: object) -> None:
    """Run a program as ``fairseq-posenc preprocess`` does."""
    preprocessing.run(Namespace(program=name, options=list(map(str, words))))


def binarize(line_format: LineFormat, *words: object, characters: bool = False) -> None:
    """Make a data-bin of running text, in one process unless ``words`` say otherwise."""
    parser = Parser()
    options.add_arguments(parser, characters=characters)
    command.run(parser.parse_args(["--workers", "1", *map(str, words)]), line_format)


def write_pieces(
    folder: Path, size: int, lines: Iterable[str] = (" ".join(WORDS),) * 30, **options: Any
) -> Path:
    """Learn sentencepieces of lines; return the file of the model."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_prefix=str(folder / f"pieces{size}"),
        vocab_size=size,
        minloglevel=2,
        **{"hard_vocab_limit": False, **options},
    )
    return folder / f"pieces{size}.model"


def write_bpe(folder: Path, texts: Sequence[str], merges: int = 120) -> Path:
    """Learn a byte-level BPE; write the files of GPT-2 and of fairseq."""
    tokenizer = ByteLevelBPETokenizer()
    size = {"vocab_size": 256 + merges, "min_frequency": 1}
    tokenizer.train_from_iterator(texts, **size, show_progress=False)
    vocabulary, rules = map(Path, tokenizer.save_model(str(folder)))
    rules.rename(folder / "vocab.bpe")
    encoder = json.loads(vocabulary.rename(folder / "encoder.json").read_text(encoding="utf-8"))
    entries = "".join(f"{number} 1\n" for number in sorted(encoder.values()))
    (folder / "dict.txt").write_text(entries, encoding="utf-8")
    return folder


def bpe_options(folder: Path) -> list[object]:
    """Return the options of the programs for a byte-level BPE."""
    files = {"encoder-json": "encoder.json", "vocab-bpe": "vocab.bpe", "dict": "dict.txt"}
    return [word for name, file in files.items() for word in (f"--{name}", folder / file)]


def fairseqs_bpe(folder: Path) -> Any:
    """Read the files of GPT-2 as fairseq does."""
    return gpt2_bpe_utils.get_encoder(str(folder / "encoder.json"), str(folder / "vocab.bpe"))


def write_squad(
    path: Path,
    asked: Mapping[str, Sequence[Mapping[str, Any]]] = MappingProxyType({BIRDS: [ASKED] * 3}),
    version: str | None = "1.1",
) -> Path:
    """Write a file of SQuAD: questions q1, q2 and so on by context; answers are given as texts."""
    paragraphs: list[dict[str, Any]] = []
    numbers = itertools.count(1)
    for context, questions in asked.items():
        qas = [{"id": f"q{next(numbers)}", "question": "?", **question} for question in questions]
        for qa in qas:
            if "answers" in qa:
                found = {text: max(context.find(text), 0) for text in qa["answers"]}
                qa["answers"] = [{"text": x, "answer_start": place} for x, place in found.items()]
        paragraphs.append({"context": context, "qas": qas})
    content = {"version": version, "data": [{"paragraphs": paragraphs}]}
    path.write_text(json.dumps(content), encoding="utf-8")
    return path
