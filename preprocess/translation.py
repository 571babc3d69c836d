r"""Converts parallel text to a fairseq data-bin: IWSLT 2017, Multi30k, or files line by line.

  fairseq-posenc preprocess translation iwslt17 fr-en.tgz --out data-bin/iwslt17.fr-en
  fairseq-posenc preprocess translation multi30k multi30k/ --vocab-size 8000 --out data-bin/multi30k
  fairseq-posenc preprocess translation files --train text/train --valid text/dev \
      --test text/test --source-lang de --target-lang en --out data-bin/de-en

Pieces are learnt from the training text with sentencepiece, or taken from source.spm, target.spm
and vocab.json of a model of Helsinki-NLP (--sentencepiece-model). Beside fairseq's files, the
folder has sentencepiece.model (or sentencepiece.LANGUAGE.model, if each language has its own), the
raw validation and test sets, valid.raw.LANGUAGE and test.raw.LANGUAGE, to compute BLEU against, and
manifest.json with the options, the inputs' SHA-256, and all counts. Further sets are called valid1,
test1 and so on, as in fairseq. The test set of IWSLT 2017 is tst2010 to tst2015, joined; test1 to
test6 are these years.
"""

from __future__ import annotations

import argparse
import math
from functools import partial
from pathlib import Path
from typing import Optional

from binarize.options import add_workers, integer
from binarize.output import make_folder
from parallel.iwslt import TESTS
from parallel.preparation import DEFAULTS, ParallelSettings, prepare


def run(args: argparse.Namespace) -> None:
    """Make the data-bin; models and sets that an interrupted run finished are kept."""
    settings = ParallelSettings.from_args(args)
    corpus = settings.read_corpus()
    make_folder(args.out, settings.request(corpus), partial(prepare, corpus, settings))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a subcommand for each kind of corpus."""
    corpora = parser.add_subparsers(dest="corpus", required=True, metavar="CORPUS")
    iwslt = corpora.add_parser("iwslt17", help="a release of IWSLT 2017, for one language pair")
    iwslt.add_argument("path", type=Path, help="its .tgz, or a folder with its files")
    _add_sets(iwslt, valid=["dev2010"], test=["+".join(TESTS), *TESTS])
    multi30k = corpora.add_parser("multi30k", help="Multi30k, task 1, raw text")
    multi30k.add_argument("path", type=Path, help="folder with train.fr.gz, val.fr.gz and so on")
    _add_sets(multi30k, valid=["val"], test=["test_2016_flickr"])
    files = corpora.add_parser("files", help="files of any other corpus, one for each language")
    text = "name of the training files before .LANGUAGE[.gz]"
    files.add_argument("--train", required=True, metavar="PREFIX", help=text)
    _add_sets(files, valid=None, test=None)
    for corpus in (iwslt, multi30k, files):
        _add_options(corpus)


def _add_sets(parser: argparse.ArgumentParser, **defaults: Optional[list[str]]) -> None:
    """Add ``--valid`` and ``--test``, which are required if they have no default."""
    add = parser.add_argument
    for name, default in defaults.items():
        text = f"one or several sets (default: {' '.join(default)})" if default else "as --train"
        add(f"--{name}", nargs="+", metavar="SET", default=default, required=not default, help=text)


def _add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that all kinds of corpora share."""
    parser.set_defaults(path=None, train=None)  # which only some of them have
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder to make")
    add("--source-lang", default="fr", help="source language (default: fr)")
    add("--target-lang", default="en", help="target language (default: en)")
    add(
        "--sentencepiece-model",
        nargs=2,
        type=Path,
        metavar=("SOURCE", "TARGET"),
        help="trained models instead of new ones, in the format of Helsinki-NLP: source.spm and "
        "target.spm, with vocab.json beside the first",
    )
    text = f"number of pieces (default: {DEFAULTS['vocab_size']})"
    add("--vocab-size", type=integer(1), metavar="N", help=text)
    text = f"kind of pieces (default: {DEFAULTS['model_type']})"
    add("--model-type", choices=["bpe", "unigram"], help=text)
    add("--separate", action="store_true", help="learn pieces for each language separately")
    text = "maximum pieces of a training sentence (default: 250)"
    add("--max-length", type=integer(1), metavar="N", default=250, help=text)
    text = "maximum ratio of the lengths of a training pair (default: 3)"
    add("--max-ratio", type=_ratio, metavar="X", default=3, help=text)
    add_workers(parser)


def _ratio(text: str) -> float:
    """Parse a finite number of at least 1."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 1 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a finite number of at least 1, not '{text}'")
    return number
