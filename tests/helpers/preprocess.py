"""Runs the programs of preprocess/ in this process, and writes the files that they need."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import sentencepiece

from binarize import command, options
from binarize.formats import LineFormat
from fairseq_posenc.workbench import preprocessing
from fairseq_posenc.workbench.running.options import Parser

PROGRAMS = Path(__file__).parents[2] / "preprocess"
WORDS = ["red", "blue", "green", "a", "bird", "sees", "the", "old", "tree", "and", "sings", "it"]
FACTS = [("the old tree sings of a red bird", "which bird sings", "red bird")] * 3


def start(name: str, *words: object) -> None:
    """Run a program as ``fairseq-posenc preprocess`` does."""
    preprocessing.run(Namespace(program=name, options=list(map(str, words))))


def binarize(line_format: LineFormat, *words: object, characters: bool = False) -> None:
    """Make a data-bin of running text, in one process unless ``words`` say otherwise."""
    parser = Parser()
    options.add_arguments(parser, characters=characters)
    command.run(parser.parse_args(["--workers", "1", *map(str, words)]), line_format)


def write_pieces(folder: Path, size: int) -> Path:
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([" ".join(WORDS)] * 30),
        model_prefix=str(folder / f"pieces{size}"),
        vocab_size=size,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return folder / f"pieces{size}.model"


def write_squad(path: Path, marks: str = "?") -> Path:
    paragraphs = [
        {
            "context": context,
            "qas": [
                {
                    "id": f"q{number}",
                    "question": question + marks,
                    "answers": [{"text": answer, "answer_start": context.index(answer)}],
                }
            ],
        }
        for number, (context, question, answer) in enumerate(FACTS)
    ]
    path.write_text(json.dumps({"version": "1.1", "data": [{"paragraphs": paragraphs}]}))
    return path
