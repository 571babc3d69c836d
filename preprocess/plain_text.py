r"""Converts plain text (BooksCorpus, OpenWebText, any other text) to a fairseq data-bin.

A line is a paragraph or a sentence; an empty line or the end of a file ends a document.

  fairseq-posenc preprocess plain_text --train books/ --valid valid.txt --out data-bin/books \
      --encoder-json encoder.json --vocab-bpe vocab.bpe --dict dict.txt \
      --sentences --longest-line 511
"""

import argparse

from binarize import command, formats, options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    options.add_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Make the data-bin."""
    command.run(args, formats.plain)
