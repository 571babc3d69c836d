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
from parallel.iwslt import read_iwslt
from parallel.pieces import Pieces, SubwordEncoder, TrainedPieces, train_model
from parallel.texts import ParallelCorpus, ParallelSplit, read_files

_DEFAULTS = {"vocab_size": 16384, "model_type": "bpe", "separate": False}  # of learnt pieces


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
        path, train = getattr(args, "path", None), getattr(args, "train", None)
        computed: dict[str, Any] = {"path": path, "train": train, "trained": None}
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
                    f"{option}: --sentencepiece-model already sets this; leave {option} out"
                )
            computed["trained"] = TrainedPieces(*args.sentencepiece_model)
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


def filter_pairs(
    source: Pieces, target: Pieces, max_length: int, max_ratio: float
) -> tuple[Pieces, Pieces, dict[str, int]]:
    """Drop pairs that are empty, too long, or too different in length.

    Args:
        source: pieces of each source sentence.
        target: pieces of each target sentence.
        max_length: maximum pieces of either side.
        max_ratio: maximum ratio of the longer side to the shorter one.

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
    return [pair[0] for pair in kept], [pair[1] for pair in kept], dropped


class Preparation:
    """Makes the data-bin of a corpus in a work folder.

    Args:
        corpus: the text.
        settings: settings of the data-bin.
        work: the folder.
        lock: descriptor of the folder's lock, which ``fairseq-preprocess`` inherits.
    """

    def __init__(
        self, corpus: ParallelCorpus, settings: ParallelSettings, work: Path, lock: int
    ) -> None:
        self._settings = settings
        self._languages = settings.languages
        self._splits = {"train": corpus.train}
        for kind, splits in (("valid", corpus.valid), ("test", corpus.test)):
            self._splits |= {f"{kind}{number or ''}": split for number, split in enumerate(splits)}
        self._work, self._lock = work, lock
        self._text = work / "pieces"  # for fairseq-preprocess; removed at the end

    def run(self) -> dict[str, Any]:
        """Run all steps; return the counts of each split."""
        self._text.mkdir()
        encoders = self._choose_pieces()
        results = {}
        for name, split in self._splits.items():
            results[name] = self._write_split(name, split, encoders)
            print(f"{name}: {_describe(results[name])}", flush=True)
        self._binarize()
        shutil.rmtree(self._text)
        return results

    def _choose_pieces(self) -> tuple[SubwordEncoder, SubwordEncoder]:
        """Take the sentencepiece models or train them, and write them to the folder."""
        settings = self._settings
        split = self._splits["train"]
        names = [f"sentencepiece.{language}.model" for language in self._languages]
        if settings.trained is not None:
            for name, model in zip(names, settings.trained.contents):
                (self._work / name).write_bytes(model)
            return settings.trained.encoders
        assert settings.vocab_size is not None
        assert settings.model_type is not None
        say(f"learning {settings.vocab_size:,} sentencepieces ({settings.model_type})")
        sides = [side.lines for side in split.sides]
        texts = sides if settings.separate else [[*sides[0], *sides[1]]]
        encoders = []
        for name, lines in zip(names if settings.separate else ["sentencepiece.model"], texts):
            model = train_model(lines, settings.vocab_size, settings.model_type)
            (self._work / name).write_bytes(model)
            encoders.append(SubwordEncoder(self._work / name))
        return encoders[0], encoders[-1]

    def _write_split(
        self, name: str, split: ParallelSplit, encoders: tuple[SubwordEncoder, SubwordEncoder]
    ) -> dict[str, Any]:
        """Write the pieces of a split, and the raw text of a test set; return the counts."""
        sides = [encoder.encode(side.lines) for encoder, side in zip(encoders, split.sides)]
        figures: dict[str, Any] = {"set": split.name, "read": len(sides[0])}
        if name == "train":
            limits = self._settings.max_length, self._settings.max_ratio
            *sides, figures["dropped"] = filter_pairs(sides[0], sides[1], *limits)
            self._write_dictionaries(encoders, sides)
        figures["kept"] = len(sides[0])
        if not sides[0]:
            raise UserError(
                f"{split.source.origin}: {_describe(figures)}, so there is nothing to train on; "
                "choose another --max-length and --max-ratio"
            )
        for language, encoder, side, text in zip(self._languages, encoders, sides, split.sides):
            figures[language] = encoder.write(self._text / f"{name}.{language}", side)
            counts = figures[language]
            warn_of_unknown(f"{name}.{language}", counts["unknown"], counts["pieces"])
            if name != "train":
                raw = "".join(f"{line}\n" for line in text.lines)
                # Not NAME.SOURCE-TARGET.LANGUAGE, which fairseq would read instead of its data.
                (self._work / f"{name}.raw.{language}").write_text(raw, encoding="utf-8")
        return figures

    def _write_dictionaries(
        self, encoders: tuple[SubwordEncoder, SubwordEncoder], sides: list[Pieces]
    ) -> None:
        texts = [[side] for side in sides] if self._settings.separate else [sides] * 2
        for language, encoder, text in zip(self._languages, encoders, texts):
            encoder.write_dictionary(self._text / f"dict.{language}.txt", chain(*text))

    def _binarize(self) -> None:
        """Run ``fairseq-preprocess`` on the pieces of all splits."""
        source, target = self._languages
        target_dictionary = ["--tgtdict", str(self._text / f"dict.{target}.txt")]
        command = [
            *("fairseq-preprocess", "--source-lang", source, "--target-lang", target),
            *("--srcdict", str(self._text / f"dict.{source}.txt")),
            *(target_dictionary if self._settings.separate else ["--joined-dictionary"]),
            *("--destdir", str(self._work), "--workers", str(self._settings.workers)),
        ]
        for kind in ("train", "valid", "test"):
            names = [str(self._text / name) for name in self._splits if name.startswith(kind)]
            command += [f"--{kind}pref", ",".join(names)]
        say("running fairseq-preprocess")
        run_logged(command, self._text / "preprocess.log", self._lock)


def _describe(figures: dict[str, Any]) -> str:
    dropped = [f"{count:,} {why}" for why, count in figures.get("dropped", {}).items() if count]
    why = f" (dropped: {', '.join(dropped)})" if dropped else ""
    return f"{figures['kept']:,} pairs of {figures['read']:,} kept{why}"
