"""From text to data-bin: pieces learnt and applied, pairs filtered, ``fairseq-preprocess`` run."""

from __future__ import annotations

import argparse
import shutil
from itertools import chain
from pathlib import Path
from typing import Any

from fairseq_posenc.errors import UserError
from fairseq_posenc.running.programs import run_logged
from fairseq_posenc.running.progress import say
from parallel.filters import Limits, Pieces, keep
from parallel.pieces import Encoder, train
from parallel.texts import Corpus, Split


class Preparation:
    """The way from text to data-bin.

    Args:
        corpus: the text.
        args: the options.
        work: folder to write to.
        lock: open file that fairseq's program keeps open while it runs.
    """

    def __init__(self, corpus: Corpus, args: argparse.Namespace, work: Path, lock: int) -> None:
        self._args = args
        self._languages = (args.source_lang, args.target_lang)
        self._splits = {"train": corpus.train}
        for kind, splits in (("valid", corpus.valid), ("test", corpus.test)):
            self._splits |= {f"{kind}{number or ''}": split for number, split in enumerate(splits)}
        self._work, self._lock = work, lock
        self._text = work / "pieces"  # for fairseq-preprocess; removed at the end

    def run(self) -> dict[str, Any]:
        """Do all steps and return the figures of each split."""
        self._text.mkdir()
        encoders = self._train_pieces()
        results = {}
        for name, split in self._splits.items():
            results[name] = self._write_split(name, split, encoders)
            print(f"{name}: {_summary(results[name])}", flush=True)
        self._preprocess()
        shutil.rmtree(self._text)
        return results

    def _train_pieces(self) -> tuple[Encoder, Encoder]:
        args, split = self._args, self._splits["train"]
        names = [f"sentencepiece.{language}.model" for language in self._languages]
        if args.given is not None:
            for name, model in zip(names, args.given.contents):
                (self._work / name).write_bytes(model)
            return args.given.encoders
        say(f"learning {args.vocab_size:,} sentencepieces ({args.model_type})")
        sides = [split.source.lines, split.target.lines]
        texts = sides if args.separate else [[*sides[0], *sides[1]]]
        encoders = []
        for name, lines in zip(names if args.separate else ["sentencepiece.model"], texts):
            model = train(lines, args.vocab_size, args.model_type)
            (self._work / name).write_bytes(model)
            encoders.append(Encoder(self._work / name))
        return encoders[0], encoders[-1]

    def _write_split(
        self, name: str, split: Split, encoders: tuple[Encoder, Encoder]
    ) -> dict[str, Any]:
        sides = [encoder.encode(side.lines) for encoder, side in zip(encoders, split[1:])]
        figures: dict[str, Any] = {"set": split.name, "read": len(sides[0])}
        if name == "train":
            limits = Limits(self._args.max_length, self._args.max_ratio)
            *sides, figures["dropped"] = keep(sides[0], sides[1], limits)
            self._write_dictionaries(encoders, sides)
        figures["kept"] = len(sides[0])
        if not sides[0]:
            raise UserError(
                f"{split.source.origin}: {_summary(figures)}, so there is nothing to train on; "
                "choose another --max-length and --max-ratio"
            )
        for language, encoder, side, text in zip(self._languages, encoders, sides, split[1:]):
            figures[language] = encoder.write(self._text / f"{name}.{language}", side)
            if name != "train":
                raw = "".join(f"{line}\n" for line in text.lines)
                # Not NAME.SOURCE-TARGET.LANGUAGE, which fairseq would read instead of its own.
                (self._work / f"{name}.raw.{language}").write_text(raw, encoding="utf-8")
        return figures

    def _write_dictionaries(self, encoders: tuple[Encoder, Encoder], sides: list[Pieces]) -> None:
        texts = [[side] for side in sides] if self._args.separate else [sides] * 2
        for language, encoder, text in zip(self._languages, encoders, texts):
            encoder.write_dictionary(self._text / f"dict.{language}.txt", chain(*text))

    def _preprocess(self) -> None:
        source, target = self._languages
        own = ["--tgtdict", str(self._text / f"dict.{target}.txt")]
        command = [
            *("fairseq-preprocess", "--source-lang", source, "--target-lang", target),
            *("--srcdict", str(self._text / f"dict.{source}.txt")),
            *(own if self._args.separate else ["--joined-dictionary"]),
            *("--destdir", str(self._work), "--workers", str(self._args.workers)),
        ]
        for kind in ("train", "valid", "test"):
            names = [str(self._text / name) for name in self._splits if name.startswith(kind)]
            command += [f"--{kind}pref", ",".join(names)]
        say("running fairseq-preprocess")
        run_logged(command, self._text / "preprocess.log", self._lock)


def _summary(figures: dict[str, Any]) -> str:
    dropped = [f"{count:,} {why}" for why, count in figures.get("dropped", {}).items() if count]
    why = f" (dropped: {', '.join(dropped)})" if dropped else ""
    return f"{figures['kept']:,} pairs of {figures['read']:,} kept{why}"
