#!/usr/bin/env python3
r"""Make a fairseq data-bin of parallel text: IWSLT 2017, Multi30k, or files of one's own.

    python preprocess/translation.py iwslt17 fr-en.tgz --out data-bin/iwslt17.fr-en
    python preprocess/translation.py multi30k multi30k/ --vocab-size 8000 --out data-bin/multi30k
    python preprocess/translation.py files --train text/train --valid text/dev --test text/test \
        --source-lang de --target-lang en --out data-bin/de-en

Pieces are learnt from the training text with sentencepiece, or are those of ``source.spm``,
``target.spm`` and ``vocab.json`` of a model of Helsinki-NLP (``--sentencepiece-model``). Beside
what fairseq reads, the folder gets ``sentencepiece.model`` (or ``sentencepiece.LANGUAGE.model``, if
each language has its own), the validation and test sets as they were, ``valid.raw.LANGUAGE`` and
``test.raw.LANGUAGE``, to compute BLEU against, and ``manifest.json``: the options, the inputs'
SHA-256, and all counts. Further sets are called ``valid1``, ``test1`` and so on, as fairseq calls
them. The test set of IWSLT 2017 is all of tst2010 to tst2015, joined, and ``test1`` to ``test6``
are the years one by one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Callable, Optional

from fairseq_posenc.errors import UserError
from fairseq_posenc.running.ending import ended
from fairseq_posenc.running.files import checksum
from fairseq_posenc.running.folders import Folder
from fairseq_posenc.running.options import Parser, add_workers, count
from parallel.files import read_files
from parallel.given import GivenPieces
from parallel.iwslt import TESTS, read_iwslt
from parallel.preparation import Preparation
from parallel.texts import Corpus


def main(arguments: Optional[Sequence[str]] = None) -> None:
    """Run the program.

    Raises:
        UserError: wrong input; the message says what, where, and what to do.
    """
    args = _parser().parse_args(arguments)
    _choose_pieces(args)
    corpus = args.read(args)
    if args.given is not None:
        corpus.inputs.update({str(path): checksum(path) for path in args.given.paths})
    folder = Folder(args.out, _request(args, corpus), called="request")
    if "," in str(folder.partial):
        raise UserError(f"--out {args.out}: fairseq-preprocess cannot have commas in names")
    if folder.is_done():
        return
    with folder.begun() as lock:
        results = Preparation(corpus, args, folder.partial, lock).run()
        folder.finish({"left_out": corpus.left_out, "results": results})


def _choose_pieces(args: argparse.Namespace) -> None:
    """Set the options of learning pieces to their defaults, or read the pieces that are given."""
    args.given = None
    if args.sentencepiece_model is None:
        args.vocab_size = 16384 if args.vocab_size is None else args.vocab_size
        args.model_type = args.model_type or "bpe"
        return
    for name in ("vocab_size", "model_type", "separate"):
        if getattr(args, name):
            option = f"--{name.replace('_', '-')}"
            raise UserError(f"{option}: --sentencepiece-model has that already; leave {option} out")
    args.given = GivenPieces(*args.sentencepiece_model)


def _request(args: argparse.Namespace, corpus: Corpus) -> dict[str, Any]:
    """Return all that the result depends on."""
    names = ["source_lang", "target_lang", "vocab_size", "model_type", "separate"]
    names += ["max_length", "max_ratio"]
    sets = {"valid": corpus.valid, "test": corpus.test}
    return {
        "options": {
            "corpus": args.corpus,
            **{name: [split.name for split in splits] for name, splits in sets.items()},
            **{name: getattr(args, name) for name in names},
        },
        "inputs": corpus.inputs,
    }


def _iwslt17(args: argparse.Namespace) -> Corpus:
    return read_iwslt(args.path, (args.source_lang, args.target_lang), args.valid, args.test)


def _files(args: argparse.Namespace) -> Corpus:
    return read_files(args.train, args.valid, args.test, (args.source_lang, args.target_lang))


def _multi30k(args: argparse.Namespace) -> Corpus:
    valid, test = ([str(args.path / name) for name in names] for names in (args.valid, args.test))
    languages = (args.source_lang, args.target_lang)
    return read_files(str(args.path / "train"), valid, test, languages)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(description=__doc__)
    corpora = parser.add_subparsers(dest="corpus", required=True, metavar="CORPUS")
    iwslt = corpora.add_parser("iwslt17", help="a release of IWSLT 2017, for one pair of languages")
    iwslt.add_argument("path", type=Path, help="its .tgz, or a folder with its files")
    _add_sets(iwslt, _iwslt17, ["dev2010"], ["+".join(TESTS), *TESTS])
    multi30k = corpora.add_parser("multi30k", help="Multi30k, task 1, raw text")
    multi30k.add_argument("path", type=Path, help="folder with train.fr.gz, val.fr.gz and so on")
    _add_sets(multi30k, _multi30k, ["val"], ["test_2016_flickr"])
    files = corpora.add_parser("files", help="files of any other corpus, one for each language")
    files.add_argument(
        "--train", required=True, metavar="PREFIX", help="file names before .LANGUAGE[.gz]"
    )
    _add_sets(files, _files, None, None)
    for one in (iwslt, multi30k, files):
        _add_options(one)
    return parser


def _add_sets(
    parser: argparse.ArgumentParser,
    read: Callable[[argparse.Namespace], Corpus],
    valid: Optional[list[str]],
    test: Optional[list[str]],
) -> None:
    parser.set_defaults(read=read)
    for name, default in (("--valid", valid), ("--test", test)):
        known = f"one or several sets (default: {' '.join(default)})" if default else "as --train"
        parser.add_argument(
            name, nargs="+", metavar="SET", default=default, required=not default, help=known
        )


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder to make")
    add("--source-lang", default="fr", help="(default: fr)")
    add("--target-lang", default="en", help="(default: en)")
    add(
        "--sentencepiece-model",
        nargs=2,
        type=Path,
        metavar=("SOURCE", "TARGET"),
        help="pieces that were learnt elsewhere, in the format of Helsinki-NLP's models: "
        "source.spm and target.spm, with vocab.json beside the first (default: learn them)",
    )
    add("--vocab-size", type=count, help="number of pieces (default: 16384)")
    add("--model-type", choices=["bpe", "unigram"], help="(default: bpe)")
    add("--separate", action="store_true", help="pieces of its own for each language")
    add("--max-length", type=count, default=250, help="most pieces to train on (default: 250)")
    add("--max-ratio", type=float, default=3, help="most times as many pieces (default: 3)")
    add_workers(parser)


if __name__ == "__main__":
    sys.exit(ended(main))
