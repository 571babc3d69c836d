"""Makes a data-bin of parallel text: sentencepieces, filtering, fairseq's files."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import numpy as np
from fairseq.data import Dictionary

from binarize.options import build_settings
from binarize.output import Manifest, say
from binarize.vocabulary import save_dictionary
from fairseq_posenc.errors import UserError
from fairseq_posenc.folders import checksum
from fairseq_posenc.tokens.data_set import write_items
from fairseq_posenc.tokens.symbols import warn_of_unknown
from fairseq_posenc.tokens.tokenizer import Encoded

from .iwslt import read_iwslt
from .pieces import VOCABULARY, SubwordVocabulary, read_vocabulary, train_model
from .texts import ParallelCorpus, ParallelSplit, read_files

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
    source_lang: str
    target_lang: str
    # Trained models of both languages, and their vocab.json; None to learn pieces.
    trained: Optional[tuple[Path, Path, Path]]
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
            UserError: options contradict each other.
        """
        computed: dict[str, Any] = {"trained": None}
        if args.sentencepiece_model is None:
            chosen = {name: getattr(args, name) for name in DEFAULTS}
            computed |= {name: value or DEFAULTS[name] for name, value in chosen.items()}
        else:
            for name in filter(vars(args).get, DEFAULTS):
                option = f"--{name.replace('_', '-')}"
                raise UserError(
                    f"{option}: --sentencepiece-model already sets this; leave {option} out"
                )
            source, target = args.sentencepiece_model
            computed["trained"] = source, target, source.with_name(VOCABULARY)
            for path in computed["trained"]:
                if not path.is_file():
                    raise UserError(f"--sentencepiece-model: {path} is not there")
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
        """Read the corpus."""
        if self.train is None:
            assert self.path
            return read_iwslt(self.path, self.languages, self.valid, self.test)
        return read_files(self.train, self.valid, self.test, self.languages)

    def request(self, corpus: ParallelCorpus) -> dict[str, Any]:
        """List all settings and checksums that the data-bin depends on."""
        names = ["source_lang", "target_lang", *DEFAULTS, "max_length", "max_ratio"]
        models = {str(path): checksum(path) for path in self.trained or ()}
        return {
            "options": {
                "corpus": self.corpus,
                "valid": [split.name for split in corpus.valid],
                "test": [split.name for split in corpus.test],
                **{name: getattr(self, name) for name in names},
            },
            "inputs": corpus.inputs | models,
        }


def choose_pairs(
    source: np.ndarray, target: np.ndarray, max_length: int, max_ratio: float
) -> tuple[np.ndarray, dict[str, int]]:
    """Choose the training pairs whose lengths are fit.

    Pairs with an empty side, with more than ``max_length`` pieces, or whose longer side has more
    than ``max_ratio`` times the pieces of the shorter one are dropped.

    Args:
        source: numbers of pieces of the source sentences, ``(N,)``.
        target: the same of the target sentences.
        max_length: maximum pieces of a sentence.
        max_ratio: maximum ratio.

    Returns:
        A mask of the pairs to keep, ``(N,)``, and the number of those dropped by reason.
    """
    shorter, longer = np.minimum(source, target), np.maximum(source, target)
    is_kept = np.ones(len(source), dtype=bool)
    dropped = {}
    for reason, is_unfit in (
        ("empty", shorter == 0),
        ("too long", longer > max_length),
        ("lengths too different", longer > max_ratio * shorter),
    ):
        dropped[reason] = int((is_kept & is_unfit).sum())
        is_kept &= ~is_unfit
    return is_kept, dropped


def prepare(corpus: ParallelCorpus, settings: ParallelSettings, manifest: Manifest) -> None:
    """Make the data-bin of a corpus; models and splits that an interrupted run made are kept."""
    splits = {"train": corpus.train}
    for prefix, sets in (("valid", corpus.valid), ("test", corpus.test)):
        for number, split in enumerate(sets):
            splits[f"{prefix}{number or ''}"] = split  # valid, valid1, valid2 ...
    manifest.entries["left_out"] = corpus.left_out
    vocabularies = _make_vocabularies(corpus.train, settings, manifest)
    for name, split in splits.items():
        if manifest.read("results", name) is None:
            figures = _write_split(name, split, vocabularies, settings, manifest.folder)
            manifest.save("results", name, figures)
            print(f"{name}: {_describe(figures)}", flush=True)


def _make_vocabularies(
    train: ParallelSplit, settings: ParallelSettings, manifest: Manifest
) -> list[SubwordVocabulary]:
    """Load or train the sentencepiece models of both languages; write them to the folder."""
    names = [f"sentencepiece.{language}.model" for language in settings.languages]
    paths = [manifest.folder / name for name in names]
    if settings.trained is not None:
        *models, vocabulary = settings.trained
        for model, path in zip(models, paths):
            shutil.copyfile(model, path)
        pieces = read_vocabulary(vocabulary)
        return [SubwordVocabulary.load(model, pieces) for model in models]
    assert settings.vocab_size is not None
    assert settings.model_type is not None
    texts = [side.lines for side in train.sides]
    if not settings.separate:
        paths = [manifest.folder / "sentencepiece.model"] * 2
        texts = [[*texts[0], *texts[1]]] * 2
    for path, lines in zip(paths, texts):
        if manifest.read("models", path.name) is None:
            say(f"learning {settings.vocab_size:,} sentencepieces ({settings.model_type})")
            path.write_bytes(
                train_model(lines, settings.vocab_size, settings.model_type, settings.workers)
            )
            manifest.save("models", path.name, checksum(path))
    return [SubwordVocabulary.load(path) for path in paths]


def _write_split(
    name: str,
    split: ParallelSplit,
    vocabularies: Sequence[SubwordVocabulary],
    settings: ParallelSettings,
    folder: Path,
) -> dict[str, Any]:
    """Write a split, and the raw text of a test set; return the counts."""
    sides = [vocabulary.encode(text) for vocabulary, text in zip(vocabularies, split.sides)]
    figures: dict[str, Any] = {"set": split.name, "read": len(split.source.lines)}
    if name == "train":
        is_kept, figures["dropped"] = choose_pairs(
            sides[0].sizes - 1, sides[1].sizes - 1, settings.max_length, settings.max_ratio
        )
        sides = [
            Encoded(tokens[np.repeat(is_kept, sizes)], sizes[is_kept]) for tokens, sizes in sides
        ]
    figures["kept"] = len(sides[0].sizes)
    if not figures["kept"]:
        raise UserError(
            f"{split.source.origin}: {_describe(figures)}, so there is nothing to train on; "
            "choose another --max-length and --max-ratio"
        )
    pair = "-".join(settings.languages)
    for language, (_, dictionary), side, text in zip(
        settings.languages, vocabularies, sides, split.sides
    ):
        if name == "train":
            counted = [side] if settings.separate else sides
            counts = np.bincount(np.concatenate([tokens for tokens, _ in counted]))
            _save_dictionary(dictionary, counts, folder / f"dict.{language}.txt")
        else:  # not NAME.SOURCE-TARGET.LANGUAGE, which fairseq would read instead of its data
            raw = "".join(f"{line}\n" for line in text.lines)
            (folder / f"{name}.raw.{language}").write_text(raw, encoding="utf-8")
        write_items(folder / f"{name}.{pair}.{language}", side)
        unknown = int((side.tokens == dictionary.unk()).sum())
        pieces = len(side.tokens) - len(side.sizes)
        figures[language] = {"pieces": pieces, "unknown": unknown}
        warn_of_unknown(f"{name}.{language}", unknown, pieces)
    return figures


def _save_dictionary(dictionary: Dictionary, counts: np.ndarray, path: Path) -> None:
    """Save a dictionary with the number of each of its symbols in the training text."""
    counted = Dictionary()
    for index in range(dictionary.nspecial, len(dictionary)):
        counted.add_symbol(dictionary[index], n=int(counts[index]) if index < len(counts) else 0)
    save_dictionary(counted, path)


def _describe(figures: dict[str, Any]) -> str:
    dropped = figures.get("dropped", {})
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in dropped.items() if count)
    text = f"{figures['kept']:,} pairs of {figures['read']:,} kept"
    return f"{text} (dropped: {reasons})" if reasons else text
