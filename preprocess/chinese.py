r"""Converts Chinese plain text to a fairseq data-bin; every character is a token.

The dictionary is made from the training text, unless --dict names one. Text is not normalised.

  fairseq-posenc preprocess chinese --train zh.train --valid zh.valid --test zh.test \
      --out data-bin/zh --min-count 5 --longest-line 512
"""

import sys

from binarize import command, formats, options
from fairseq_posenc.workbench.running.exit_codes import run_main


def main() -> None:
    """Run the program."""
    args = options.make_parser(__doc__, characters=True).parse_args()
    command.run(args, formats.plain)


if __name__ == "__main__":
    sys.exit(run_main(main))
