r"""Converts WikiText-2 or WikiText-103 to a fairseq data-bin: train, valid and test.

A line is a paragraph, a heading between equal signs, or empty. By default all lines become items,
the empty ones too, as in fairseq's recipes for its language models and RoBERTa. With --articles
there is an empty item only between two articles. For GPT-2 BPE use the raw files
(wikitext-103-raw), which have no <unk>; for --words use the files with <unk>.

  fairseq-posenc preprocess wikitext --train wiki.train.raw --valid wiki.valid.raw \
      --test wiki.test.raw --out data-bin/wikitext-103 \
      --encoder-json encoder.json --vocab-bpe vocab.bpe --dict dict.txt
"""

import argparse

from binarize import command, formats, options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    options.add_arguments(parser)
    parser.set_defaults(empty_lines=None)  # --empty-lines was not given: `run` chooses its value
    add = parser.add_argument
    add("--articles", action="store_true", help="write an empty item only between articles")
    add("--no-headings", action="store_true", help="drop the headings")


def run(args: argparse.Namespace) -> None:
    """Make the data-bin."""
    if args.empty_lines is None:  # with `articles`, the format leaves only titles an empty line
        args.empty_lines = "documents" if args.articles else "keep"
    command.run(args, formats.WikiText(articles=args.articles, headings=not args.no_headings))
