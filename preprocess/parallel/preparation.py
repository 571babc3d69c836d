"""Makes a data-bin of parallel text: sentencepieces, filtering, fairseq's files."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Optional

import numpy as np

from binarize.options import build_settings
from binarize.output import Manifest, say
from binarize.store import SIZE, Position, Store, delete_sizes
from binarize.vocabulary import save_dictionary
from fairseq_posenc.errors import UserError
from fairseq_posenc.folders import checksum
from fairseq_posenc.tokens.symbols import warn_of_unknown
from fairseq_posenc.tokens.tokenizer import SpecialSymbols

from .iwslt import read_iwslt
from .pieces import UNKNOWN, PieceIds, SubwordEncoder, TrainedPieces, train_model
from .texts import NumberedLines, ParallelCorpus, ParallelSplit, read_files

# Options of learnt pieces, and their defaults. argparse does not know the defaults, because
# --sentencepiece-model allows none of these options.
DEFAULTS = {"vocab_size": 16384, "model_type": "bpe", "separate": False}


@dataclass(frozen=True)
class ParallelSettings:
    """The settings of one data-bin; most fields have the names of the options."""

    corpus: str
    path: Optional[Path]  # the release or the folder of the corpus; None if `train` names the files
    train: Optional[str]  # prefix of the training files; None for IWSLT
    valid: list[str]  # validation sets
    test: list[str]  # test sets
    out: Path
    source_lang: str
    target_lang: str
    trained: Optional[TrainedPieces]  # of `--sentencepiece-model`; None to learn pieces
    vocab_size: Optional[int]
    model_type: Optional[str]
    separate: bool
    max_length: int
    max_ratio: float
    workers: int

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> ParallelSettings:
        """Build the settings from the parsed options.

        Raises:
            UserError: options contradict each other, or a sentencepiece model is broken.
        """
        if args.max_ratio < 1:
            raise UserError(f"--max-ratio {args.max_ratio:g}: give 1 or more")
        learning = {name: getattr(args, name) for name in DEFAULTS}
        computed = _choose_pieces(learning, args.sentencepiece_model)
        if args.corpus == "multi30k":  # files in a folder
            computed["train"] = str(args.path / "train")
            computed["valid"] = [str(args.path / name) for name in args.valid]
            computed["test"] = [str(args.path / name) for name in args.test]
        return build_settings(cls, args, **computed)

    @property
    def languages(self) -> tuple[str, str]:
        """Source and target language."""
        return self.source_lang, self.target_lang

    def read_corpus(self) -> ParallelCorpus:
        """Read the corpus, and add the files of sentencepiece models to its inputs."""
        if self.train is None:
            assert self.path
            corpus = read_iwslt(self.path, self.languages, self.valid, self.test)
        else:
            corpus = read_files(self.train, self.valid, self.test, self.languages)
        if self.trained is not None:
            corpus.inputs.update({str(path): checksum(path) for path in self.trained.paths})
        return corpus

    def request(self, corpus: ParallelCorpus) -> dict[str, Any]:
        """List all settings and checksums that the data-bin depends on."""
        names = ["source_lang", "target_lang", *DEFAULTS, "max_length", "max_ratio"]
        return {
            "options": {
                "corpus": self.corpus,
                "valid": [split.name for split in corpus.valid],
                "test": [split.name for split in corpus.test],
                **{name: getattr(self, name) for name in names},
            },
            "inputs": corpus.inputs,
        }


def _choose_pieces(learning: dict[str, Any], models: Optional[list[Path]]) -> dict[str, Any]:
    """Collect the settings of the pieces: learnt ones, or those of ``--sentencepiece-model``."""
    if models is None:
        learnt = {name: learning[name] or default for name, default in DEFAULTS.items()}
        return {**learnt, "trained": None}
    if name := next(filter(learning.get, learning), None):
        option = f"--{name.replace('_', '-')}"
        raise UserError(f"{option}: --sentencepiece-model already sets this; leave {option} out")
    return {**learning, "trained": TrainedPieces(*models)}


def filter_pairs(
    source: PieceIds, target: PieceIds, max_length: int, max_ratio: float
) -> tuple[PieceIds, PieceIds, dict[str, int]]:
    """Drop pairs with an empty side, with more than ``max_length`` pieces, or of unequal length.

    The ratio of the longer side to the shorter one is at most ``max_ratio``.

    Returns:
        Both sides of the pairs kept, and the number of those dropped by reason.
    """
    dropped = {"empty": 0, "too long": 0, "lengths too different": 0}
    kept = []
    for pair in zip(source, target):
        shorter, longer = sorted(map(len, pair))
        if not shorter:
            dropped["empty"] += 1
        elif longer > max_length:
            dropped["too long"] += 1
        elif longer > max_ratio * shorter:
            dropped["lengths too different"] += 1
        else:
            kept.append(pair)
    return [source for source, _ in kept], [target for _, target in kept], dropped


Encoders = tuple[SubwordEncoder, SubwordEncoder]


def prepare(corpus: ParallelCorpus, settings: ParallelSettings, manifest: Manifest) -> None:
    """Make the data-bin of a corpus; models and splits that an interrupted run made are kept."""
    splits = {"train": corpus.train}
    for prefix, listed in (("valid", corpus.valid), ("test", corpus.test)):
        for number, split in enumerate(listed):
            splits[f"{prefix}{number or ''}"] = split  # valid, valid1, valid2 ...
    encoders = _make_encoders(corpus.train, settings, manifest)
    for name, split in splits.items():
        if manifest.read("results", name) is None:
            figures = _write_split(name, split, encoders, settings, manifest.folder)
            manifest.save("results", name, figures)
            print(f"{name}: {_describe(figures)}", flush=True)
    manifest.save("left_out", corpus.left_out)


def _make_encoders(
    train: ParallelSplit, settings: ParallelSettings, manifest: Manifest
) -> Encoders:
    """Load or train the sentencepiece models of both languages; write them to the folder."""
    names = [f"sentencepiece.{language}.model" for language in settings.languages]
    if settings.trained is not None:
        for name, model in zip(names, settings.trained.models):
            (manifest.folder / name).write_bytes(model)
        return settings.trained.encoders
    assert settings.vocab_size is not None
    assert settings.model_type is not None
    texts = [side.lines for side in train.sides]
    if not settings.separate:
        names = ["sentencepiece.model"]
        texts = [list(chain(*texts))]
    encoders = []
    for name, lines in zip(names, texts):
        path = manifest.folder / name
        if manifest.read("models", name) is None:
            say(f"learning {settings.vocab_size:,} sentencepieces ({settings.model_type})")
            model = train_model(lines, settings.vocab_size, settings.model_type, settings.workers)
            path.write_bytes(model)
            manifest.save("models", name, checksum(path))
        encoders.append(SubwordEncoder(path))
    return encoders[0], encoders[-1]  # the same one, if both languages share it


def _write_split(
    name: str, split: ParallelSplit, encoders: Encoders, settings: ParallelSettings, folder: Path
) -> dict[str, Any]:
    """Write a split, and the raw text of a test set; return the counts."""
    sides = [
        encoder.encode(side.lines, settings.workers) for encoder, side in zip(encoders, split.sides)
    ]
    figures: dict[str, Any] = {"set": split.name, "read": len(sides[0])}
    if name == "train":
        source, target, figures["dropped"] = filter_pairs(
            sides[0], sides[1], settings.max_length, settings.max_ratio
        )
        sides = [source, target]
    figures["kept"] = len(sides[0])
    if not sides[0]:
        raise UserError(
            f"{split.source.origin}: {_describe(figures)}, so there is nothing to train on; "
            "choose another --max-length and --max-ratio"
        )
    pair = "-".join(settings.languages)
    for language, encoder, side, text in zip(settings.languages, encoders, sides, split.sides):
        if name == "train":
            counted = side if settings.separate else chain(*sides)
            dictionary = encoder.build_dictionary(counted)
            save_dictionary(dictionary, folder / f"dict.{language}.txt")
        symbols = SpecialSymbols.from_dictionary(encoder.build_dictionary(()))
        _write_side(side, symbols, folder / f"{name}.{pair}.{language}")
        unknown = sum(line.count(UNKNOWN) for line in side)
        pieces = sum(map(len, side))
        figures[language] = {"pieces": pieces, "unknown": unknown}
        warn_of_unknown(f"{name}.{language}", unknown, pieces)
        if name != "train":
            _write_raw(text, folder / f"{name}.raw.{language}")
    return figures


def _write_side(lines: PieceIds, symbols: SpecialSymbols, prefix: Path) -> None:
    """Write one language of a split as fairseq's data set."""
    store = Store(prefix, symbols.dtype, Position())
    for line in lines:
        tokens = np.array([*line, symbols.eos], symbols.dtype)
        store.append(tokens.tobytes(), np.array([len(tokens)], SIZE).tobytes())
    store.finish()
    delete_sizes(prefix)


def _write_raw(text: NumberedLines, path: Path) -> None:
    # Not NAME.SOURCE-TARGET.LANGUAGE, which fairseq would read instead of its data.
    path.write_text("".join(f"{line}\n" for line in text.lines), encoding="utf-8")


def _describe(figures: dict[str, Any]) -> str:
    dropped = figures.get("dropped", {})
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in dropped.items() if count)
    text = f"{figures['kept']:,} pairs of {figures['read']:,} kept"
    return f"{text} (dropped: {reasons})" if reasons else text
