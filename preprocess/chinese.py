r"""Converts Chinese plain text to a fairseq data-bin; every character is a token.

The dictionary is made from the training text, unless --dict names one. Text is not normalized.

  fairseq-posenc preprocess chinese --train zh.train --valid zh.valid --test zh.test \
      --out data-bin/zh --min-count 5 --longest-line 512
"""

from functools import partial

from binarize import command, formats, options

add_arguments = partial(options.add_arguments, characters=True)
run = partial(command.run, line_format=formats.plain)
