r"""Mixes several corpora, each sampled to a size, into one text, and holds out a part of it.

Each --corpus is a format (plain, json, wikipedia, wikitext), files or folders, and settings:
size=64GiB samples documents up to this size, lines=158400000 up to this number of lines,
hold-out=50000 holds this number of documents (see --unit) out for validation, where=FIELD=VALUE and
field=NAME are for json (and Parquet).

  fairseq-posenc preprocess mix --out text/books-wiki --sentences --unit lines \
      --corpus plain books/ hold-out=5000 --corpus wikipedia extracts/ hold-out=15000
  fairseq-posenc preprocess plain_text --train text/books-wiki/train/ \
      --valid text/books-wiki/valid.txt --out data-bin/books-wiki --longest-line 511 \
      --encoder-json encoder.json --vocab-bpe vocab.bpe --dict dict.txt

OUT/train has text files, each with documents of all corpora; OUT/valid.txt has the text held out,
and OUT/manifest.json all counts. The same seed samples the same documents on every machine.
"""

from __future__ import annotations

import argparse
from functools import cache, partial
from pathlib import Path

from binarize.formats import check_format, describe_format
from binarize.options import add_invalid_lines, add_workers, build_settings, integer
from binarize.output import make_folder
from binarize.shards import Extent, combine_checksums, find_files, parts_of_shard
from mixing.draw import DOCUMENTS, LINES, CorpusRequest, parse_corpus
from mixing.mixture import MixtureRules, mix_corpora

# Reads a file for its checksum once, even if several corpora are in one file, as in the Pile.
_with_checksum = cache(Extent.with_checksum)


def run(args: argparse.Namespace) -> None:
    """Mix the corpora; the corpora that an interrupted run finished are kept."""
    corpora = [(corpus, _find_parts(corpus)) for corpus in map(parse_corpus, args.corpus)]
    rules = build_settings(MixtureRules, args)
    request = {
        # The text is the same for any number of workers.
        "options": {**vars(rules), "workers": None},
        "corpora": [
            [describe_format(corpus.format), corpus.size, corpus.unit, corpus.hold_out]
            for corpus, _ in corpora
        ],
        "inputs": [combine_checksums(parts) for _, parts in corpora],
    }
    make_folder(args.out, request, partial(mix_corpora, corpora, rules))


def _find_parts(corpus: CorpusRequest) -> list[Extent]:
    files = find_files(corpus.paths)
    check_format(corpus.format, files)
    return list(map(_with_checksum, parts_of_shard(files)))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add(
        "--corpus",
        action="append",
        nargs="+",
        required=True,
        metavar="WORD",
        help="FORMAT PATH ... [size=64GiB | lines=N] [hold-out=N] [field=NAME] [where=FIELD=VALUE]",
    )
    add("--out", type=Path, required=True, help="folder to make")
    add("--seed", type=int, default=1, help="random seed (default: %(default)s)")
    add("--sentences", action="store_true", help="split lines into sentences, by rules")
    text = "unit of hold-out=; lines are sentences with --sentences (default: %(default)s)"
    add("--unit", choices=(DOCUMENTS, LINES), default=DOCUMENTS, help=text)
    text = "number of training files (default: %(default)s)"
    add("--files", type=integer(1), metavar="N", default=16, help=text)
    add_invalid_lines(parser)
    add_workers(parser)
