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
import sys
from functools import cache
from pathlib import Path
from typing import Any

from binarize.formats import check_format, describe_format
from binarize.options import add_invalid_lines
from binarize.shards import Input, combine_checksums, find_files, parts_of_shard
from fairseq_posenc.workbench.running.exit_codes import (
    run_main,
    signals_as_keyboard_interrupt,
)
from fairseq_posenc.workbench.running.folders import WholeFolder
from fairseq_posenc.workbench.running.options import (
    Parser,
    add_count,
    add_workers,
    build_settings,
)
from fairseq_posenc.workbench.running.progress import format_counts
from mixing.draw import DOCUMENTS, LINES, CorpusRequest, parse_corpus
from mixing.mixture import Mixture, MixtureRules

_FORMAT = 2  # version of manifest.json
# Reads a file for its checksum once, even if several corpora are in one file, as in the Pile.
_compute_input = cache(Input.from_part)


def main() -> None:
    """Run the program."""
    args = _make_parser().parse_args()
    corpora = [(corpus, _find_inputs(corpus)) for corpus in map(parse_corpus, args.corpus)]
    rules = build_settings(MixtureRules, args, skip_invalid=args.invalid_lines == "skip")
    folder = WholeFolder(args.out, _make_plan(corpora, rules))
    if folder.check_done():
        return
    with signals_as_keyboard_interrupt(), folder.resume() as saved:
        content = Mixture(corpora, rules, folder, saved).make()
        folder.finish(content)
    for (corpus, _), counts in zip(corpora, content["drawn"]):
        print(f"{corpus.option}: {format_counts(counts)}")


def _find_inputs(corpus: CorpusRequest) -> list[Input]:
    parts = parts_of_shard(find_files(corpus.paths), 0, 1)
    check_format(corpus.format, [part.path for part in parts])
    return list(map(_compute_input, parts))


def _make_plan(
    corpora: list[tuple[CorpusRequest, list[Input]]], rules: MixtureRules
) -> dict[str, Any]:
    """List everything that the text depends on."""
    return {
        "format": _FORMAT,
        # The text is the same for any number of workers.
        "options": {**rules._asdict(), "workers": None},
        "corpora": [
            [describe_format(corpus.format), corpus.size, corpus.unit, corpus.hold_out]
            for corpus, _ in corpora
        ],
        "inputs": [combine_checksums(inputs) for _, inputs in corpora],
    }


def _make_parser() -> argparse.ArgumentParser:
    parser = Parser(description=__doc__)
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
    add_count(parser, "--files", "number of training files", 16)
    add_invalid_lines(parser)
    add_workers(parser)
    return parser


if __name__ == "__main__":
    sys.exit(run_main(main))
