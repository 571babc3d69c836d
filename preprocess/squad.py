r"""Converts the published files of SQuAD 1.1 or 2.0 to a folder to train on.

    fairseq-posenc preprocess squad --train train-v1.1.json --valid dev-v1.1.json \
        --out data-bin/squad11 --encoder-json encoder.json --vocab-bpe vocab.bpe --dict dict.txt

Files may be compressed (.gz). The tokens and the dictionary must be those of the model's
pre-training. A question with a long paragraph becomes several windows; a window without the answer
has <s> as its answer. The folder also has the files of the vocabulary, and manifest.json with
the options, the inputs' SHA-256, and all counts.
"""

from __future__ import annotations

import argparse
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from binarize.output import Manifest, check_made, format_counts, say
from binarize.vocabulary import Vocabulary, add_vocabulary
from fairseq_posenc.checkpoints.dictionary import DICTIONARY, load_dictionary
from fairseq_posenc.errors import UserError
from fairseq_posenc.folders import checksum, whole_folder
from fairseq_posenc.tasks.squad.databin import Limits
from fairseq_posenc.tokens.squad_file import Squad, read_squad
from fairseq_posenc.tokens.squad_windows import WindowMaker, write_split
from fairseq_posenc.tokens.tokenizer import ENCODER_JSON, MERGES, PIECES

_SPLITS = ("train", "valid")
_NAMES = {  # option of the vocabulary -> name of its file in the folder
    "dict": DICTIONARY,
    "sentencepiece_model": PIECES,
    "encoder_json": ENCODER_JSON,
    "vocab_bpe": MERGES,
}


@dataclass(frozen=True)
class SquadSettings:
    """The settings of the folder."""

    inputs: dict[str, Path]  # split -> file of SQuAD
    out: Path  # folder to make
    vocabulary: Vocabulary
    files: dict[str, Path]  # name in the folder -> file of the vocabulary
    limits: Limits  # of windows and questions, in tokens

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> SquadSettings:
        """Build the settings from the parsed options.

        Raises:
            UserError: an option has a wrong value, or a file is missing.
        """
        limits = Limits(args.max_length, args.stride, args.max_question)
        limits.check()
        vocabulary = Vocabulary.from_args(args)
        vocabulary.load_dictionary()  # raises an error at once if it is empty
        chosen = vocabulary.files
        files = {name: chosen[option] for option, name in _NAMES.items() if option in chosen}
        inputs = {split: getattr(args, split) for split in _SPLITS}
        return cls(inputs, args.out, vocabulary, files, limits)

    def request(self, squads: dict[str, Squad]) -> dict[str, Any]:
        """List everything that the folder depends on.

        Raises:
            UserError: the files are of different versions of SQuAD.
        """
        train, valid = (squads[split] for split in _SPLITS)
        if train.version != valid.version:
            raise UserError(
                f"{train.path} is SQuAD {train.version}, but {valid.path} is {valid.version}"
            )
        return {
            "version": train.version,
            "limits": self.limits._asdict(),
            "inputs": {split: checksum(path) for split, path in self.inputs.items()},
            "vocabulary": {name: checksum(path) for name, path in self.files.items()},
        }


def run(args: argparse.Namespace) -> None:
    """Write the folder; a split that an interrupted run finished is kept."""
    settings = SquadSettings.from_args(args)
    squads = {split: read_squad(path) for split, path in settings.inputs.items()}
    request = settings.request(squads)
    if check_made(settings.out, request):
        return
    with whole_folder(settings.out, request) as partial:
        for name, path in settings.files.items():
            shutil.copyfile(path, partial / name)
        dictionary = load_dictionary(partial / DICTIONARY)
        tokenizer = settings.vocabulary.load_encoder(dictionary)
        assert tokenizer  # only words and characters, which are no options here, have none
        window_maker = WindowMaker(tokenizer, dictionary, settings.limits)
        manifest = Manifest(partial, request)
        for split, squad in squads.items():
            if manifest.read("splits", split) is None:
                say(f"{split}: {len(squad.questions):,} questions")
                counts = write_split(squad, window_maker, partial / split)
                manifest.save("splits", split, counts)
        counts_by_split = manifest.read("splits")
    say(f"wrote {settings.out}")
    for split, counts in counts_by_split.items():
        print(f"{split}: {format_counts(counts)}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("--train", type=Path, required=True, help="train-v1.1.json or train-v2.0.json")
    add("--valid", type=Path, required=True, help="dev-v1.1.json or dev-v2.0.json")
    add("--out", type=Path, required=True, help="folder to make")
    add("--dict", type=Path, required=True, help="dict.txt of the pre-training")
    add_vocabulary(parser)
    texts = {
        "max_length": "maximum tokens of a window",
        "stride": "tokens from the start of a window to that of the next",
        "max_question": "maximum tokens of a question; longer ones are cut",
    }
    for name, default in Limits()._asdict().items():
        option = f"--{name.replace('_', '-')}"
        text = f"{texts[name]} (default: {default})"
        add(option, type=int, default=default, help=text)
