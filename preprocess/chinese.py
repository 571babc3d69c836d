r"""Converts Chinese plain text to a fairseq data-bin; every character is a token.

The dictionary is made from the training text, unless --dict names one. Text is not normalised.

  fairseq-posenc preprocess chinese --train zh.train --valid zh.valid --test zh.test \
      --out data-bin/zh --min-count 5 --longest-line 512
"""

import argparse

from binarize import command, formats, options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    options.add_arguments(parser, characters=True)


def run(args: argparse.Namespace) -> None:
    """Make the data-bin."""
    command.run(args, formats.plain)
