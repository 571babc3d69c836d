r"""Converts plain text (BooksCorpus, OpenWebText, any other text) to a fairseq data-bin.

A line is a paragraph or a sentence; an empty line or the end of a file ends a document.

  fairseq-posenc preprocess plain_text --train books/ --valid valid.txt --out data-bin/books \
      --encoder-json encoder.json --vocab-bpe vocab.bpe --dict dict.txt \
      --sentences --longest-line 511
"""

import sys

from binarize import command, formats, options
from fairseq_posenc.workbench.running.exit_codes import run_main


def main() -> None:
    """Run the program; the docstring of this file is its help."""
    command.run(options.make_parser(__doc__).parse_args(), formats.plain)


if __name__ == "__main__":
    sys.exit(run_main(main))
