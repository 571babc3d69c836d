"""Makes a data-bin of parallel text: sentencepieces, filtering, then ``fairseq-preprocess``."""

from __future__ import annotations

import argparse
import shutil
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Optional

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.running.files import checksum
from fairseq_posenc.workbench.running.options import build_settings
from fairseq_posenc.workbench.running.programs import run_logged
from fairseq_posenc.workbench.running.progress import say
from fairseq_posenc.workbench.tokens.symbols import warn_of_unknown

from .iwslt import read_iwslt
from .pieces import PieceIds, SubwordEncoder, TrainedPieces, train_model
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

    def plan(self, corpus: ParallelCorpus) -> dict[str, Any]:
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


class Preparation:
    """Makes the data-bin of a corpus in the folder ``work``.

    ``lock`` is the descriptor of the folder's lock, which ``fairseq-preprocess`` inherits.
    """

    def __init__(
        self, corpus: ParallelCorpus, settings: ParallelSettings, work: Path, lock: int
    ) -> None:
        self._settings = settings
        self._languages = settings.languages
        self._splits = {"train": corpus.train}
        for prefix, splits in (("valid", corpus.valid), ("test", corpus.test)):
            for number, split in enumerate(splits):
                self._splits[f"{prefix}{number or ''}"] = split  # valid, valid1, valid2 ...
        self._work, self._lock = work, lock
        self._pieces_folder = work / "pieces"  # for fairseq-preprocess; removed at the end

    def run(self) -> dict[str, Any]:
        """Run all steps; return the counts of each split."""
        self._pieces_folder.mkdir()
        encoders = self._make_encoders()
        results = {}
        for name, split in self._splits.items():
            results[name] = self._write_split(name, split, encoders)
            print(f"{name}: {_describe(results[name])}", flush=True)
        self._binarize()
        shutil.rmtree(self._pieces_folder)
        return results

    def _make_encoders(self) -> tuple[SubwordEncoder, SubwordEncoder]:
        """Load or train the sentencepiece models of both languages; write them to the folder."""
        settings = self._settings
        names = [f"sentencepiece.{language}.model" for language in self._languages]
        if settings.trained is not None:
            for name, model in zip(names, settings.trained.models):
                (self._work / name).write_bytes(model)
            return settings.trained.encoders
        assert settings.vocab_size is not None
        assert settings.model_type is not None
        say(f"learning {settings.vocab_size:,} sentencepieces ({settings.model_type})")
        texts = [side.lines for side in self._splits["train"].sides]
        if not settings.separate:
            names = ["sentencepiece.model"]
            texts = [list(chain(*texts))]
        encoders = []
        for name, lines in zip(names, texts):
            model = train_model(lines, settings.vocab_size, settings.model_type)
            (self._work / name).write_bytes(model)
            encoders.append(SubwordEncoder(self._work / name))
        return encoders[0], encoders[-1]  # the same one, if both languages share it

    def _write_split(
        self, name: str, split: ParallelSplit, encoders: tuple[SubwordEncoder, SubwordEncoder]
    ) -> dict[str, Any]:
        """Write the pieces of a split, and the raw text of a test set; return the counts."""
        sides = [encoder.encode(side.lines) for encoder, side in zip(encoders, split.sides)]
        figures: dict[str, Any] = {"set": split.name, "read": len(sides[0])}
        if name == "train":
            source, target, figures["dropped"] = filter_pairs(
                sides[0], sides[1], self._settings.max_length, self._settings.max_ratio
            )
            sides = [source, target]
            self._write_dictionaries(encoders, sides)
        figures["kept"] = len(sides[0])
        if not sides[0]:
            raise UserError(
                f"{split.source.origin}: {_describe(figures)}, so there is nothing to train on; "
                "choose another --max-length and --max-ratio"
            )
        for language, encoder, side, text in zip(self._languages, encoders, sides, split.sides):
            figures[language] = encoder.write(self._pieces_folder / f"{name}.{language}", side)
            counts = figures[language]
            warn_of_unknown(f"{name}.{language}", counts["unknown"], counts["pieces"])
            if name != "train":
                raw = "".join(f"{line}\n" for line in text.lines)
                # Not NAME.SOURCE-TARGET.LANGUAGE, which fairseq would read instead of its data.
                (self._work / f"{name}.raw.{language}").write_text(raw, encoding="utf-8")
        return figures

    def _write_dictionaries(
        self, encoders: tuple[SubwordEncoder, SubwordEncoder], sides: list[PieceIds]
    ) -> None:
        if not self._settings.separate:
            sides = [list(chain(*sides))] * 2
        for language, encoder, lines in zip(self._languages, encoders, sides):
            encoder.write_dictionary(self._pieces_folder / f"dict.{language}.txt", lines)

    def _binarize(self) -> None:
        """Run ``fairseq-preprocess`` on the pieces of all splits."""
        source, target = self._languages
        folder = self._pieces_folder
        command = ["fairseq-preprocess", "--source-lang", source, "--target-lang", target]
        command += ["--destdir", str(self._work), "--workers", str(self._settings.workers)]
        command += ["--srcdict", str(folder / f"dict.{source}.txt")]
        if self._settings.separate:
            command += ["--tgtdict", str(folder / f"dict.{target}.txt")]
        else:
            command.append("--joined-dictionary")
        for prefix in ("train", "valid", "test"):
            files = [str(folder / name) for name in self._splits if name.startswith(prefix)]
            command += [f"--{prefix}pref", ",".join(files)]
        say("running fairseq-preprocess")
        run_logged(command, self._pieces_folder / "preprocess.log", self._lock)


def _describe(figures: dict[str, Any]) -> str:
    dropped = figures.get("dropped", {})
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in dropped.items() if count)
    text = f"{figures['kept']:,} pairs of {figures['read']:,} kept"
    return f"{text} (dropped: {reasons})" if reasons else text
