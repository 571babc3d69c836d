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
from pathlib import Path

from binarize.output import Manifest, format_counts, make_folder, say
from binarize.vocabulary import Vocabulary, add_vocabulary
from fairseq_posenc.checkpoints.dictionary import DICTIONARY
from fairseq_posenc.errors import UserError, counted
from fairseq_posenc.folders import checksum
from fairseq_posenc.tasks.squad.databin import Limits
from fairseq_posenc.tokens.squad_file import read_squad
from fairseq_posenc.tokens.squad_windows import WindowMaker, write_split
from fairseq_posenc.tokens.tokenizer import ENCODER_JSON, MERGES, PIECES

_NAMES = {  # option of the vocabulary -> name of its file in the folder
    "dict": DICTIONARY,
    "sentencepiece_model": PIECES,
    "encoder_json": ENCODER_JSON,
    "vocab_bpe": MERGES,
}


def run(args: argparse.Namespace) -> None:
    """Write the folder; a split that an interrupted run finished is kept.

    Raises:
        UserError: an option has a wrong value, or the files are of different versions of SQuAD.
    """
    limits = Limits(max_length=args.max_length, stride=args.stride, max_question=args.max_question)
    limits.check()
    vocabulary = Vocabulary.from_args(args)
    dictionary = vocabulary.load_dictionary()
    squads = {"train": read_squad(args.train), "valid": read_squad(args.valid)}
    version = squads["train"].version
    if squads["valid"].version != version:
        other = squads["valid"].version
        raise UserError(f"{args.train} is SQuAD {version}, but {args.valid} is {other}")
    request = {  # all that the folder's content depends on
        "version": version,
        "limits": limits._asdict(),
        "inputs": {split: checksum(squad.path) for split, squad in squads.items()},
        "vocabulary": {_NAMES[name]: sha256 for name, sha256 in vocabulary.checksums().items()},
    }

    def write_splits(manifest: Manifest) -> None:
        for option, path in vocabulary.files.items():
            shutil.copyfile(path, manifest.folder / _NAMES[option])
        maker = WindowMaker(vocabulary.load_tokenizer(dictionary), dictionary, limits)
        for split, squad in squads.items():
            if manifest.read("splits", split) is None:  # an interrupted run has not finished it
                say(f"{split}: {counted(len(squad.questions), 'questions')}")
                manifest.save("splits", split, write_split(squad, maker, manifest.folder / split))
            print(f"{split}: {format_counts(manifest.read('splits', split))}")

    make_folder(args.out, request, write_splits)


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
        "stride": "tokens from the start of one window to the start of the next",
        "max_question": "maximum tokens of a question; longer ones are cut",
    }
    for name, default in Limits()._asdict().items():
        option = f"--{name.replace('_', '-')}"
        add(option, type=int, default=default, help=f"{texts[name]} (default: {default})")
