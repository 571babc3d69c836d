#!/usr/bin/env python3
r"""Make a folder to train on from files of SQuAD 1.1 or 2.0, as they are published.

    python preprocess/squad.py --train train-v1.1.json --valid dev-v1.1.json \
        --out data-bin/squad11 --encoder-json encoder.json --vocab-bpe vocab.bpe --dict dict.txt

Files may be compressed (.gz). The tokens and the dictionary must be those of the model's
pre-training. Questions with a long paragraph become several windows; a window without the answer
points at its <s>. The folder gets the files of the vocabulary, and ``manifest.json``: the options,
the inputs' SHA-256, and all counts.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

from binarize import vocabulary
from fairseq_posenc.errors import UserError
from fairseq_posenc.running.ending import ended
from fairseq_posenc.running.files import checksum
from fairseq_posenc.running.folders import Folder
from fairseq_posenc.running.options import Parser
from fairseq_posenc.running.progress import format_counts, say
from fairseq_posenc.squad import databin
from fairseq_posenc.squad.data import Squad, read_squad
from fairseq_posenc.tasks.squad.databin import Limits
from fairseq_posenc.tokens.tokenizer import ENCODER, MERGES, PIECES, load_tokenizer
from fairseq_posenc.transformer.dictionary import DICTIONARY, load_dictionary

SPLITS = ("train", "valid")


def main(arguments: Optional[Sequence[str]] = None) -> None:
    """Run the program.

    Raises:
        UserError: wrong input; the message says what, where, and what to do.
    """
    args = _parser().parse_args(arguments)
    limits = Limits(args.max_length, args.stride, args.max_question)
    limits.check()
    files = _vocabulary(args)
    for path in (*files.values(), args.train, args.valid):
        if not path.is_file():
            raise UserError(f"{path}: no such file")
    squads = {split: read_squad(getattr(args, split)) for split in SPLITS}
    folder = Folder(args.out, _plan(squads, files, limits))
    if folder.is_done():
        return
    with folder.begun():
        for name, path in files.items():
            shutil.copyfile(path, folder.partial / name)
        dictionary = load_dictionary(folder.partial / DICTIONARY)
        tokenizer = load_tokenizer(folder.partial, dictionary)
        encoder = databin.Encoder(tokenizer, dictionary, limits)
        counts = {}
        for split, squad in squads.items():
            say(f"{split}: {len(squad.questions):,} questions")
            prefix = folder.partial / split
            counts[split] = databin.write_split(squad, encoder, len(dictionary), prefix)
        folder.finish({"splits": counts})
    for split, count in counts.items():
        print(f"{split}: {format_counts(count)}")


def _vocabulary(args: argparse.Namespace) -> dict[str, Path]:
    """Return the files that the folder gets, by the names that they have there."""
    vocabulary.check(args)
    vocabulary.dictionary(args)  # refuses one without symbols
    files = {DICTIONARY: args.dict}
    if args.sentencepiece_model:
        return {**files, PIECES: args.sentencepiece_model}
    return {**files, ENCODER: args.encoder_json, MERGES: args.vocab_bpe}


def _plan(squads: dict[str, Squad], files: dict[str, Path], limits: Limits) -> dict[str, Any]:
    """Return all that the folder depends on."""
    train, valid = (squads[split] for split in SPLITS)
    if train.version != valid.version:
        raise UserError(
            f"{train.path} is SQuAD {train.version}, but {valid.path} is {valid.version}"
        )
    return {
        "version": train.version,
        "limits": limits._asdict(),
        "inputs": {split: checksum(squad.path) for split, squad in squads.items()},
        "vocabulary": {name: checksum(path) for name, path in files.items()},
    }


def _parser() -> argparse.ArgumentParser:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("--train", type=Path, required=True, help="train-v1.1.json or train-v2.0.json")
    add("--valid", type=Path, required=True, help="dev-v1.1.json or dev-v2.0.json")
    add("--out", type=Path, required=True, help="folder to make")
    add("--dict", type=Path, required=True, help="dict.txt of the pre-training")
    vocabulary.add_arguments(parser)
    default = Limits()
    add("--max-length", type=int, default=default.max_length, help="tokens (default: %(default)s)")
    add("--stride", type=int, default=default.stride, help="between windows (default: %(default)s)")
    add(
        "--max-question",
        type=int,
        default=default.max_question,
        help="longer questions are cut (default: %(default)s)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(ended(main))
