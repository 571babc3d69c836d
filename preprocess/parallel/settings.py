"""The settings of a translation data-bin."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.running.files import checksum
from fairseq_posenc.workbench.running.options import build_settings
from parallel.iwslt import read_iwslt
from parallel.pieces import GivenPieces
from parallel.texts import Corpus, read_files

_DEFAULTS = {"vocab_size": 16384, "model_type": "bpe", "separate": False}  # of learnt pieces


@dataclass(frozen=True)
class Settings:
    """The settings of one data-bin; fields are named as the options."""

    corpus: str
    # the release, or the folder of the corpus; None where `train` names the files
    path: Optional[Path]
    train: Optional[str]  # prefix of the training files; None for IWSLT
    valid: list[str]  # validation sets
    test: list[str]  # test sets
    out: Path
    source_lang: str
    target_lang: str
    given: Optional[GivenPieces]  # pieces that were learnt elsewhere; None to learn them
    vocab_size: Optional[int]
    model_type: Optional[str]
    separate: bool
    max_length: int
    max_ratio: float
    workers: int

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> Settings:
        """Build the settings from the parsed options.

        Raises:
            UserError: options contradict each other, or a file of the pieces is broken.
        """
        path, train = getattr(args, "path", None), getattr(args, "train", None)
        computed: dict[str, Any] = {"path": path, "train": train, "given": None}
        if args.corpus == "multi30k":
            names = {"valid": args.valid, "test": args.test}
            computed |= {kind: [str(args.path / name) for name in names[kind]] for kind in names}
            computed["train"] = str(args.path / "train")
        pieces = {name: getattr(args, name) for name in _DEFAULTS}
        if args.sentencepiece_model is None:
            computed |= {name: pieces[name] or default for name, default in _DEFAULTS.items()}
        else:
            for name in filter(pieces.get, pieces):
                option = f"--{name.replace('_', '-')}"
                raise UserError(
                    f"{option}: --sentencepiece-model has that already; leave {option} out"
                )
            computed["given"] = GivenPieces(*args.sentencepiece_model)
        return build_settings(cls, args, **computed)

    @property
    def languages(self) -> tuple[str, str]:
        """Source and target language."""
        return self.source_lang, self.target_lang

    def read_corpus(self) -> Corpus:
        """Read the corpus, and add the files of given pieces to its inputs."""
        if self.train is None:
            assert self.path
            corpus = read_iwslt(self.path, self.languages, self.valid, self.test)
        else:
            corpus = read_files(self.train, self.valid, self.test, self.languages)
        if self.given is not None:
            corpus.inputs.update({str(path): checksum(path) for path in self.given.paths})
        return corpus

    def plan(self, corpus: Corpus) -> dict[str, Any]:
        """List everything that the data-bin depends on."""
        names = ["source_lang", "target_lang", *_DEFAULTS, "max_length", "max_ratio"]
        return {
            "options": {
                "corpus": self.corpus,
                "valid": [split.name for split in corpus.valid],
                "test": [split.name for split in corpus.test],
                **{name: getattr(self, name) for name in names},
            },
            "inputs": corpus.inputs,
        }
