r"""Converts lines of JSON (C4, the Pile, WikiExtractor --json) to a fairseq data-bin.

A line is an object; one of its fields holds a document.

  fairseq-posenc preprocess json_lines --train c4/c4-train.*.json.gz --out data-bin/c4 \
      --valid c4/c4-validation.00000-of-00008.json.gz \
      --encoder-json encoder.json --vocab-bpe vocab.bpe --dict dict.txt \
      --sentences --longest-line 511
"""

import argparse

from binarize import command, formats, options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    options.add_arguments(parser)
    add = parser.add_argument
    add("--field", default="text", help="field with the document (default: %(default)s)")
    text = "keep only objects with this value, as in meta.pile_set_name=Pile-CC"
    add("--where", metavar="FIELD=VALUE", help=text)


def run(args: argparse.Namespace) -> None:
    """Make the data-bin."""
    command.run(args, formats.JsonField(args.field, formats.parse_where(args.where)))
