r"""Converts WikiExtractor's text files (AA/wiki_00 ...) to a fairseq data-bin.

Each article is between <doc ...> and </doc>; its first line is the title.

  python -m wikiextractor.WikiExtractor enwiki-latest-pages-articles.xml.bz2 -o extracts
  fairseq-posenc preprocess wikipedia --train extracts/ --out data-bin/wiki \
      --encoder-json encoder.json --vocab-bpe vocab.bpe --dict dict.txt \
      --sentences --longest-line 511
"""

import sys

from binarize import command, formats, options
from fairseq_posenc.workbench.running.exit_codes import run_main


def main() -> None:
    """Run the program; the docstring of this file is its help."""
    command.run(options.make_parser(__doc__).parse_args(), formats.wikipedia)


if __name__ == "__main__":
    sys.exit(run_main(main))
